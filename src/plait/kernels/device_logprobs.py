"""What a head does with its logits on a GPU, by Triton: one pass over them forward, and one backward.

By torch's operators it is ten passes forward and eight backward, most of them over float32: of a row of V logits in
bfloat16 46 V bytes and 36 V, here 2 V and 4 V. `fused_rows` does the same on a CPU
(`logprob_kernels`).

Shapes: C rows of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.kernels.on_devices import AVAILABLE

FORWARD_BLOCK, BACKWARD_BLOCK = 4096, 2048
"""Logits that a program takes at a time."""
WARPS = 8


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels compute with these, of any shapes: all bfloat16, or all float32, on a GPU."""
    dtype = tensors[0].dtype
    is_one = all(tensor.dtype == dtype and tensor.device.type == "cuda" for tensor in tensors)
    return AVAILABLE and is_one and dtype in (torch.bfloat16, torch.float32)


def logprobs(
    logits_CV: Tensor,
    temperature: float,
    targets_C: Tensor,
    logprobs_C: Tensor,
    entropies_C: Tensor,
    lse_C: Tensor,
    likeliest_C: Tensor,
) -> None:
    """See `LogprobKernels.logprobs`: [C, V] to [C]."""
    from plait.kernels import device_head_kernels  # imports triton

    rows, vocabulary = logits_CV.shape
    assert logits_CV.is_contiguous(), "rows lie one after another"
    device_head_kernels.logprobs[(rows,)](
        logits_CV, float(temperature), targets_C, logprobs_C, entropies_C, lse_C, likeliest_C,
        V=vocabulary, N=FORWARD_BLOCK, num_warps=WARPS,
    )  # fmt: skip


def logprobs_backward_(
    logits_CV: Tensor,
    temperature: float,
    targets_C: Tensor,
    lse_C: Tensor,
    entropies_C: Tensor,
    grad_logprobs_C: Tensor | None,
    grad_entropies_C: Tensor | None,
) -> Tensor:
    """See `LogprobKernels.logprobs_backward_`: [C, V]."""
    from plait.kernels import device_head_kernels  # imports triton

    rows, vocabulary = logits_CV.shape
    assert logits_CV.is_contiguous(), "rows lie one after another"
    grads = [lse_C if grad is None else grad.contiguous() for grad in (grad_logprobs_C, grad_entropies_C)]
    device_head_kernels.logprobs_backward[(rows, -(-vocabulary // BACKWARD_BLOCK))](
        logits_CV, float(temperature), targets_C, lse_C, entropies_C, *grads,
        V=vocabulary, LOGPROBS=grad_logprobs_C is not None, ENTROPIES=grad_entropies_C is not None, N=BACKWARD_BLOCK,
        num_warps=WARPS,
    )  # fmt: skip
    return logits_CV

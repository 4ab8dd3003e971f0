"""Which kernels compute log-probs and entropies of a head's logits: in bfloat16 on a CPU, and on a GPU.

Those of a GPU are compiled by Triton when they are first used. They are held then against torch's operators on a few
rows of the head's vocabulary, forward and backward; where Triton fails or they say something else, that is said once
and torch's operators are used.

Shapes: C rows, V vocabulary.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import first_line
from plait.kernels import device_logprobs, fused_rows
from plait.kernels.logprob_kernels import LogprobKernels
from plait.models.head import Head
from plait.observe.screen import say

PROOF_ROWS, PROOF_TEMPERATURE, PROOF_SCALE = 8, 0.7, 3.0
"""Rows, temperature and standard deviation of the logits that kernels are proven on."""

LARGEST_ERROR = 1e-4
"""The largest error of log-probs, entropies and log-sum-exps, as a share of their norm: float32 of any logits."""
LARGEST_GRADIENT_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""The same of gradients, which are of the logits' dtype."""


class Logits(NamedTuple):
    """A kind of logits: kernels are proven for all rows of it, with a gradient of log-probs, of entropies, and both."""

    device: torch.device
    dtype: torch.dtype
    vocabulary: int


def head_kernels(head: Head, hidden_CH: Tensor) -> LogprobKernels | None:
    """The kernels that compute with the logits of a whole linear head without bias, of hidden states [C, H]; None:
    torch's operators do. The same for all rows of a device and dtype."""
    if not head.linear or head.vocabulary is not None or head.bias is not None:
        return None
    if fused_rows.takes(hidden_CH, head.weight):
        return fused_rows
    kind = Logits(hidden_CH.device, hidden_CH.dtype, len(head.weight))
    return device_logprobs if device_logprobs.takes(hidden_CH, head.weight) and is_proven(kind) else None


@cache
def is_proven(kind: Logits, kernels: LogprobKernels = device_logprobs) -> bool:
    """Whether the kernels say what torch's operators say; said once where they do not."""
    try:
        errors = errors_of(kind, kernels)
    except Exception as raised:  # Triton's compiler may raise anything
        why = f"cannot be compiled here ({type(raised).__name__}: {first_line(raised):.200})"
    else:
        limits = LARGEST_ERROR, LARGEST_GRADIENT_ERROR[kind.dtype]
        if all(error <= limit for error, limit in zip(errors, limits, strict=True)):
            return True
        why = f"are {errors[0]:.2g}, their gradients {errors[1]:.2g} away from what torch's operators say"
    say(f"plait: log-probs of training by one kernel {why}: torch's operators compute them, slower", file=sys.stderr)
    return False


def errors_of(kind: Logits, kernels: LogprobKernels) -> tuple[float, float]:
    """The largest error of what the forward says, and of the gradients, each as a share of its norm; NaN or infinite
    where they say no number, or another likeliest token."""
    generator = torch.Generator().manual_seed(0)
    logits_CV = torch.randn(PROOF_ROWS, kind.vocabulary, generator=generator) * PROOF_SCALE
    logits_CV = logits_CV.to(kind.device, kind.dtype)
    targets_C = torch.randint(kind.vocabulary, (PROOF_ROWS,), generator=generator).to(kind.device)
    targets_C[::2] = logits_CV[::2].argmax(-1)
    scaled_CV = logits_CV.float() / PROOF_TEMPERATURE
    logp_CV = scaled_CV.log_softmax(-1)
    entropies_C = -(logp_CV.exp() * logp_CV).sum(-1)
    target_C = logp_CV.gather(1, targets_C[:, None])[:, 0]
    is_likeliest_C = logits_CV.gather(1, targets_C[:, None])[:, 0] == logits_CV.amax(-1)

    numbers = logits_CV.new_empty((3, PROOF_ROWS), dtype=torch.float32)
    likeliest_C = torch.empty_like(is_likeliest_C)
    kernels.logprobs(logits_CV, PROOF_TEMPERATURE, targets_C, *numbers.unbind(), likeliest_C)
    forward = _error(numbers, torch.stack([target_C, entropies_C, scaled_CV.logsumexp(-1)]))
    forward = forward if likeliest_C.equal(is_likeliest_C) else float("inf")

    slopes_2C = torch.tensor([[-1.0, 0.5], [1.0, -0.3]]).repeat(1, PROOF_ROWS // 2).to(kind.device)
    backward = []
    for which in ((True, False), (False, True), (True, True)):
        grads = [slope_C if has else None for slope_C, has in zip(slopes_2C.unbind(), which, strict=True)]
        expected_CV = _gradient(logp_CV, targets_C, *grads)
        given = logits_CV.clone(), PROOF_TEMPERATURE, targets_C, numbers[2], numbers[1]
        backward.append(_error(kernels.logprobs_backward_(*given, *grads).float(), expected_CV))
    return forward, float(torch.tensor(backward).max())


def _gradient(
    logp_CV: Tensor, targets_C: Tensor, grad_logprobs_C: Tensor | None, grad_entropies_C: Tensor | None
) -> Tensor:
    """The gradient of the logits, through log_softmax: with d = ∂ / ∂ logp it is (d − p Σ d) / temperature."""
    p_CV, d_CV = logp_CV.exp(), torch.zeros_like(logp_CV)
    if grad_logprobs_C is not None:
        d_CV.scatter_(1, targets_C[:, None], grad_logprobs_C[:, None])
    if grad_entropies_C is not None:
        d_CV -= grad_entropies_C[:, None] * p_CV * (logp_CV + 1)
    return (d_CV - p_CV * d_CV.sum(-1, keepdim=True)) / PROOF_TEMPERATURE


def _error(actual: Tensor, expected: Tensor) -> float:
    """The largest of the first dim, as a share of the norm of each."""
    actual, expected = actual.flatten(1), expected.flatten(1)
    return float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).max())

"""RMS norms and gates of training on a GPU, each one pass forward and one backward: the Triton kernels of liger-kernel.

Its functions are called, not its autograd Functions: those choose by the number of rows how a norm is computed, so that
a token would have other bits in another row.

Shapes: T tokens, H size of a norm, I of a gate.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from plait.kernels import on_devices

AVAILABLE = on_devices.AVAILABLE and importlib.util.find_spec("liger_kernel") is not None
"""liger-kernel is not required: without it torch's operators compute."""


def serves(device: torch.device) -> bool:
    """Whether there are kernels for a device."""
    return AVAILABLE and device.type == "cuda"


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels compute with these, of any shapes: all bfloat16, or all float32, on a GPU, none empty."""
    return on_devices.are_of_one_kind(*tensors) and all(serves(tensor.device) for tensor in tensors)


class NormLaunch(NamedTuple):
    """How the forward of a norm was launched, for its backward."""

    offset: float
    casting: int
    block: int
    warps: int


def normalised(
    x_TH: Tensor, weight_H: Tensor, eps: float, offset: float, rounds_first: bool
) -> tuple[Tensor, Tensor, NormLaunch]:
    """x / √(mean(x²) + eps) · (offset + weight) [T, H], and the inverse of the root [T], float32. A token has the same
    bits in any company.

    Args:
        x_TH: contiguous.
        weight_H: of its dtype.
        rounds_first: whether the quotient is rounded to that dtype before it meets the weight; else the product is.
    """
    from liger_kernel.ops.rms_norm import rms_norm_forward  # imports triton

    casting = "llama" if rounds_first else "gemma"
    out_TH, _, inverse_T, *launch = rms_norm_forward(x_TH, weight_H, float(eps), float(offset), casting, True)
    block, warps, number = launch
    return out_TH, inverse_T, NormLaunch(float(offset), number, block, warps)


def normalised_backward(
    grad_TH: Tensor, x_TH: Tensor, weight_H: Tensor, inverse_T: Tensor, launch: NormLaunch, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x [T, H] and of the weight [H], which is summed in float32, both in the dtype of x. Arguments
    are contiguous, and stay as they are: the gradient may be another's, too."""
    from liger_kernel.ops.rms_norm import rms_norm_backward

    offset, *how = launch
    return rms_norm_backward(  # type: ignore[no-any-return]
        grad_TH, x_TH, weight_H, inverse_T, offset, *how, in_place=False, row_mode=True, needs_dw=needs_weight
    )


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, contiguous, of one shape [..., I] and dtype."""
    from liger_kernel.ops.swiglu import swiglu_forward

    return swiglu_forward(gate, up)[2]  # type: ignore[no-any-return]


def gated_silu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up [..., I], in their memory."""
    from liger_kernel.ops.swiglu import swiglu_backward

    return swiglu_backward(gate, up, grad)  # type: ignore[no-any-return]


def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """As `gated_silu` [..., I], with GELU by tanh."""
    from liger_kernel.ops.geglu import geglu_forward

    return geglu_forward(gate, up)[2]  # type: ignore[no-any-return]


def gated_gelu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """As `gated_silu_backward_` [..., I], with GELU by tanh."""
    from liger_kernel.ops.geglu import geglu_backward

    return geglu_backward(gate, up, grad)  # type: ignore[no-any-return]

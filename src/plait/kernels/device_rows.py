"""Norms and gates of training on a GPU, by Triton: one pass over memory each, forward and backward.

What `fused_rows` is on a CPU, with its arguments. Of a norm of bfloat16 torch's operators move 32 bytes for each number
forward and some 50 backward, here 4 and 6; of a gate 10 and 18, here 6 and 10; and they keep the numbers of a norm in
float32, and the activated gate, for the backward.

Generation keeps to torch's operators, which it compiles layer by layer: these are for forwards that have a backward.

Shapes: T rows, H hidden size.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None
"""Triton comes with torch for CUDA on Linux."""

WIDEST = 1 << 14
"""Numbers of a row at most: a program of a norm holds one in registers."""
PART_ROWS = 16
"""Rows whose gradients of a weight one program adds up."""
BLOCK = 2048
"""Numbers of a gate that a program takes."""


def takes(*tensors: Tensor) -> bool:
    """Whether the kernels compute with these, of any shapes, the first with rows of at most `WIDEST` numbers: all
    bfloat16 on a GPU."""
    is_device = all(t.dtype == torch.bfloat16 and t.device.type == "cuda" for t in tensors)
    return AVAILABLE and is_device and tensors[0].shape[-1] <= WIDEST


def normalised(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """weight · (x / √(mean(x²) + eps)), contiguous, and the inverse of the root [T], float32."""
    from plait.kernels import device_row_kernels  # imports triton

    rows, hidden = x_TH.shape
    out_TH, inverse_T = torch.empty_like(x_TH), x_TH.new_empty(rows, dtype=torch.float32)
    if rows:
        device_row_kernels.normalise[(rows,)](x_TH, weight_H, out_TH, inverse_T, eps, H=hidden, WIDE=_wide(hidden))
    return out_TH, inverse_T


def normalised_backward(x_TH: Tensor, weight_H: Tensor, inverse_T: Tensor, grad_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, in its dtype, and of the weight, in float32; all contiguous."""
    from plait.kernels import device_row_kernels  # imports triton

    rows, hidden = x_TH.shape
    grad_x_TH, parts = torch.empty_like(x_TH), -(-rows // PART_ROWS)
    parts_PH = x_TH.new_empty((parts, hidden), dtype=torch.float32)
    if rows:
        device_row_kernels.normalise_backward[(parts,)](
            x_TH, weight_H, inverse_T, grad_TH, grad_x_TH, parts_PH, rows,
            H=hidden, WIDE=_wide(hidden), ROWS=PART_ROWS,
        )  # fmt: skip
    return grad_x_TH, parts_PH.sum(0)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, the first factor rounded: contiguous, of one shape, to that shape."""
    from plait.kernels import device_row_kernels  # imports triton

    out, count = torch.empty_like(gate), gate.numel()
    if count:
        device_row_kernels.gate_up[(-(-count // BLOCK),)](gate, up, out, count, N=BLOCK)
    return out


def gated_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up: contiguous, of one shape, to that shape."""
    from plait.kernels import device_row_kernels  # imports triton

    grad_gate, grad_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if count:
        grid = (-(-count // BLOCK),)
        device_row_kernels.gate_up_backward[grid](gate, up, grad, grad_gate, grad_up, count, N=BLOCK)
    return grad_gate, grad_up


def _wide(hidden: int) -> int:
    """The least power of two that is not less."""
    return 1 << (hidden - 1).bit_length()

"""Whether the kernels of norms, gates and rotations on a GPU say what torch's operators say, found at their first use.

Shapes: T rows that they are proven on, H size of a norm, I of a gate, D of a head.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import first_line
from plait.kernels import device_rotation, device_rows
from plait.models.compute.layer_forms import Gate, NormForm, Rotation, activated, rotated
from plait.observe.screen import say

PROOF_ROWS, PROOF_EPS = 150, 1e-3
"""More rows than a GPU has multiprocessors, over which the gradient of a norm's weight is divided."""

PROOF_HEADS = 19, 2
"""Query heads, of most sizes more than the kernel of rotations takes at a time, and key heads."""

LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""The largest error beside float32, as a share of its norm."""


class RowKernel(NamedTuple):
    """What a proof of a kernel holds for: all rows of this device, dtype, size and form."""

    device: torch.device
    dtype: torch.dtype
    size: int
    """Elements of a row; of a rotation those of a head."""
    form: NormForm | Gate | Rotation


@cache
def is_proven(kind: RowKernel) -> bool:
    """Whether the kernels say what torch's operators say; said once where they do not."""
    try:
        error = error_of(kind)
    except Exception as raised:  # Triton's compiler may raise anything
        why = f"cannot be compiled here ({type(raised).__name__}: {first_line(raised):.200})"
    else:
        if error <= LARGEST_ERROR[kind.dtype]:
            return True
        why = f"are {error:.2g} away from what torch's operators say"
    what = {Gate: "gates", Rotation: "rotations"}.get(type(kind.form), "norms")
    say(f"plait: {what} of {kind.size} numbers by one kernel {why}: torch's operators compute them", file=sys.stderr)
    return False


@torch.no_grad()
def error_of(kind: RowKernel) -> float:
    """The largest error of the output and of the gradients, each as a share of its norm; NaN where one is."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(kind.device, kind.dtype)

    rows = PROOF_ROWS, kind.size
    if isinstance(kind.form, Gate):
        pairs = _gates(kind.form, drawn(*rows), drawn(*rows), drawn(*rows))
    elif isinstance(kind.form, Rotation):
        heads = [drawn(1, PROOF_ROWS, count, kind.size).transpose(1, 2) for count in PROOF_HEADS * 2]
        pairs = _rotations(drawn(1, *rows), drawn(1, *rows), *heads)
    else:
        pairs = _norms(kind.form, drawn(*rows), drawn(kind.size), drawn(*rows))
    return float(torch.stack([(actual.float() - true).norm() / true.norm() for actual, true in pairs]).max())


Pairs = list[tuple[Tensor, Tensor]]
"""What a kernel says, and what is true."""


def _norms(form: NormForm, x_TH: Tensor, weight_H: Tensor, grad_TH: Tensor) -> Pairs:
    """With n = x · i, i = 1 / √(mean(x²) + eps):  ∂x = i · (g − n · mean(g · n)),  g = (offset + weight) · ∂out."""
    given = [tensor.to(torch.float32, copy=True) for tensor in (x_TH, weight_H, grad_TH)]
    out_TH, inverse_T, launch = device_rows.normalised(x_TH, weight_H, PROOF_EPS, *form)
    grads = device_rows.normalised_backward(grad_TH, x_TH, weight_H, inverse_T, launch, needs_weight=True)
    alone_TH, none = device_rows.normalised_backward(grad_TH, x_TH, weight_H, inverse_T, launch, needs_weight=False)
    assert none is None, "nobody asked for it"

    x_TH, weight_H, grad_TH = given
    inverse_T1 = torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + PROOF_EPS)
    normal_TH, scale_H = x_TH * inverse_T1, form.offset + weight_H
    sloped_TH = grad_TH * scale_H
    true_TH = inverse_T1 * (sloped_TH - normal_TH * (sloped_TH * normal_TH).mean(-1, keepdim=True))
    assert grads[1] is not None, "of the weight"
    return [
        (out_TH, normal_TH * scale_H),
        (grads[0], true_TH),
        (alone_TH, true_TH),
        (grads[1], (grad_TH * normal_TH).sum(0)),
    ]


def _gates(which: Gate, gate_TI: Tensor, up_TI: Tensor, grad_TI: Tensor) -> Pairs:
    gate, up, grad = (tensor.to(torch.float32, copy=True) for tensor in (gate_TI, up_TI, grad_TI))
    active_TI = activated(which, gate)
    if which is Gate.SILU:
        out_TI = device_rows.gated_silu(gate_TI, up_TI)
        grads = device_rows.gated_silu_backward_(grad_TI, gate_TI, up_TI)
        slope_TI = torch.ops.aten.silu_backward(grad * up, gate)
    else:
        out_TI = device_rows.gated_gelu(gate_TI, up_TI)
        grads = device_rows.gated_gelu_backward_(grad_TI, gate_TI, up_TI)
        slope_TI = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
    return [(out_TI, active_TI * up), (grads[0], slope_TI), (grads[1], grad * active_TI)]


def _rotations(cos: Tensor, sin: Tensor, query: Tensor, key: Tensor, grad_query: Tensor, grad_key: Tensor) -> Pairs:
    """cos and sin [1, T, D], the others [1, H, T, D]. Gradients of keys come in another order of memory."""
    out = device_rotation.rotated(query, key, cos, sin)
    grads = device_rotation.rotated_backward(grad_query, grad_key.contiguous(), cos, sin)
    cos, sin = cos.float(), sin.float()

    def transposed(grad: Tensor) -> Tensor:
        low, high = (grad * sin).chunk(2, -1)
        return grad * cos + torch.cat((high, -low), -1)

    return [
        *((actual, rotated(x.float(), cos, sin)) for actual, x in zip(out, (query, key), strict=True)),
        *((actual, transposed(x.float())) for actual, x in zip(grads, (grad_query, grad_key), strict=True)),
    ]

"""Gated MLPs on a CPU in bfloat16: silu(gate) · up as one pass, forward and backward, between the family's products.

Only a class whose forward is shown to be down(act(gate(x)) · up(x)) is taken over; its layers stay modules, so
adapters, parts and other products work as before. In every other dtype torch's operations compute.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from plait.kernels import fused_rows

LAYERS = ("gate_proj", "up_proj", "down_proj")


def install(module: nn.Module) -> None:
    """Let the MLPs of a module that are shown to be of the common form compute their gate here."""
    for mlp in module.modules():
        named = all(hasattr(mlp, name) for name in LAYERS) and "forward" not in vars(mlp)
        if named and fused_rows.AVAILABLE and _is_silu(getattr(mlp, "act_fn", None)) and is_proven(type(mlp)):
            mlp.forward = _Forward(mlp)


class _Forward:
    """`forward` of one MLP."""

    def __init__(self, mlp: Any) -> None:
        self.mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        mlp = self.mlp
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        if fused_rows.takes(gate, up):
            gate, up = gate.contiguous(), up.contiguous()
            if torch.is_grad_enabled():
                return mlp.down_proj(Gated.apply(gate, up))  # type: ignore[no-any-return]
            return mlp.down_proj(fused_rows.gated_(gate, up))  # type: ignore[no-any-return]
        return mlp.down_proj(mlp.act_fn(gate) * up)  # type: ignore[no-any-return]


class Gated(torch.autograd.Function):
    """silu(gate) · up, both bfloat16 of one shape, in one pass forward and one backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """See `fused_rows.gated`: of one shape, to that shape."""
        ctx.save_for_backward(gate, up)
        return fused_rows.gated(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """See `fused_rows.gated_backward`: of one shape, to that shape."""
        return fused_rows.gated_backward(*ctx.saved_tensors, grad.contiguous())


def _is_silu(activation: Any) -> bool:
    if not isinstance(activation, nn.Module):
        return False
    x = torch.linspace(-9, 9, 64)
    return torch.equal(activation(x), nn.functional.silu(x))


@functools.cache
def is_proven(kind: type[nn.Module]) -> bool:
    """Whether the class computes down(act(gate(x)) · up(x)) of its layers and activation, and nothing else."""
    generator = torch.Generator().manual_seed(0)
    mlp = kind.__new__(kind)
    nn.Module.__init__(mlp)
    for name, shape in zip(LAYERS, ((12, 8), (12, 8), (8, 12)), strict=True):
        layer = nn.Linear(shape[1], shape[0], bias=False, dtype=torch.float64, device="meta")
        weight_OI = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        layer.weight = nn.Parameter(weight_OI, requires_grad=False)
        setattr(mlp, name, layer)
    mlp.act_fn = nn.SiLU()
    x = torch.randn(1, 5, 8, generator=generator, dtype=torch.float64, device="cpu")
    try:
        return torch.equal(kind.forward(mlp, x), _Forward(mlp)(x))
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError):
        return False  # it reads more than these

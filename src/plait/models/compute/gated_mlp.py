"""Gated MLPs on a CPU in bfloat16: silu(gate) · up as one pass, forward and backward, between the family's products.

Only a class whose forward is shown to be down(act(gate(x)) · up(x)) is taken over (`layer_forms`); its layers stay
modules, so adapters, parts and other products work as before. In every other dtype torch's operations compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plait.kernels import fused_rows
from plait.models.compute.layer_forms import Gate, gate_of


def install(module: nn.Module) -> None:
    """Let the MLPs of a module that are shown to be of the common form compute their gate here."""
    for mlp in module.modules():
        if fused_rows.AVAILABLE and "forward" not in vars(mlp) and gate_of(mlp) is Gate.SILU:
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

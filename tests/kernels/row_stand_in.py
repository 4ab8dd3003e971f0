"""In the place of the kernels of norms, gates and rotations: the same by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from plait.kernels import device_rotation, device_rows
from plait.models.compute import layer_forms

NAMES = {
    "normalised": device_rows,
    "normalised_backward": device_rows,
    "gated_silu": device_rows,
    "gated_silu_backward_": device_rows,
    "gated_gelu": device_rows,
    "gated_gelu_backward_": device_rows,
    "rotated": device_rotation,
    "rotated_backward": device_rotation,
}
"""What computes, and where it is."""
Calls = list[str]


class StandIn:
    """What the kernels do, by torch in float32, outputs times `factor`, gradients times `slope`."""

    def __init__(self, factor: float = 1.0, slope: float = 1.0) -> None:
        self.factor, self.slope = factor, slope

    def normalised(self, x_TH: Tensor, weight_H: Tensor, *norm: Any) -> Any:
        inverse_T = torch.rsqrt(x_TH.float().square().mean(-1) + norm[0])
        return (self._norm(x_TH, weight_H, *norm) * self.factor).to(x_TH.dtype), inverse_T, norm

    def normalised_backward(
        self, grad_TH: Tensor, x_TH: Tensor, weight_H: Tensor, inverse_T: Tensor, norm: Any, *, needs_weight: bool
    ) -> Any:
        grads = self._grads(lambda x, w: self._norm(x, w, *norm), grad_TH, x_TH, weight_H)
        return grads[0], grads[1] if needs_weight else None

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up * self.factor

    def gated_silu_backward_(self, grad: Tensor, gate: Tensor, up: Tensor) -> Any:
        grads = self._grads(lambda gate, up: F.silu(gate) * up, grad, gate, up)
        return gate.copy_(grads[0]), up.copy_(grads[1])

    def gated_gelu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up * self.factor

    def gated_gelu_backward_(self, grad: Tensor, gate: Tensor, up: Tensor) -> Any:
        grads = self._grads(lambda gate, up: F.gelu(gate, approximate="tanh") * up, grad, gate, up)
        return gate.copy_(grads[0]), up.copy_(grads[1])

    def rotated(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return tuple(layer_forms.rotated(x, cos, sin) * self.factor for x in (query, key))

    def rotated_backward(self, grad_query: Tensor, grad_key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return tuple(self._grads(lambda x: layer_forms.rotated(x, cos, sin), x, x)[0] for x in (grad_query, grad_key))

    def _norm(self, x: Tensor, weight: Tensor, eps: float, offset: float, rounds_first: bool) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        return (offset + weight) * wide.to(x.dtype) if rounds_first else (wide * (offset + weight.float())).to(x.dtype)

    def _grads(self, computes: Any, grad: Tensor, *given: Tensor) -> list[Tensor]:
        # Kernels save nothing: the hooks of a layer that is computed again count what it saves.
        with torch.enable_grad(), saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            leaves = [one.detach().clone().requires_grad_() for one in given]
            return [one * self.slope for one in torch.autograd.grad(computes(*leaves), leaves, grad)]


def stand_in(monkeypatch: pytest.MonkeyPatch, kernels: Any, calls: Calls, where: str = "cpu") -> None:
    """Have these compute on a kind of device, and note the names of what they computed."""

    def noted(name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return getattr(kernels, name)(*given, **named)

        return call

    for module in (device_rows, device_rotation):
        monkeypatch.setattr(module, "serves", lambda device: device.type == where)
    for name, module in NAMES.items():
        monkeypatch.setattr(module, name, noted(name))

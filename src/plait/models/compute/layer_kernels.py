"""Norms, gated MLPs and rotations of packed rows on a GPU, by one kernel forward and one backward, in scoring and
training alike.

As Transformers writes a norm it is seven launches, most of them over float32, and a dozen in its backward; a rotation
of queries and keys is ten, and some twenty. Which of a family's modules compute something known, `layer_forms` says.
They have a forward of ours for as long as a forward of packed rows lasts, attention layers one that rotates by `rope`.
Then they have their own again: torch's compiler, which fuses the layers of generation, takes those.

The kernels are compiled by Triton when they are first used. They are held then against torch's operators, forward and
backward (`row_kernel_proof`); where Triton fails or they say something else, that is said once and the modules' own
operators are used.

Shapes: T tokens, H size of a norm, I of a gate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait.kernels import device_rotation, device_rows
from plait.models.compute import rope
from plait.models.compute.cpu_linear import unviewed
from plait.models.compute.layer_forms import Gate, Norm, gate_of, norm_of
from plait.models.compute.row_kernel_proof import RowKernel, is_proven


class LayerKernels:
    """The norms, gated MLPs and attention layers of a module that kernels may compute. They are looked for when they
    are first asked for: a part of a model is cut before.

    Args:
        module: of Transformers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: list[tuple[nn.Module, Callable[..., Any]]] | None = None
        self._is_applied = False

    @contextlib.contextmanager
    def applied(self, device: torch.device) -> Iterator[None]:
        """Within it these modules compute by kernels, if the device has any. It may be entered again within itself, as
        a layer's that is computed again."""
        if self._is_applied or not (device_rows.serves(device) or device_rotation.serves(device)):
            yield
            return
        if self._found is None:
            self._found = list(_found(self._module))
        changed = [(vars(module), forward) for module, forward in self._found if "forward" not in vars(module)]
        for attributes, forward in changed:
            attributes["forward"] = forward
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            for attributes, _ in changed:
                del attributes["forward"]


def _found(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    for part in module.modules():
        if (norm := norm_of(part)) is not None:
            yield part, _NormForward(part, norm)
        elif (gate := gate_of(part)) is not None:
            yield part, _GatedForward(part, gate)
        elif (forward := rope.forward_of(part)) is not None:
            yield part, forward


class _NormForward:
    """`forward` of one norm."""

    def __init__(self, module: Any, norm: Norm) -> None:
        self.module, self.norm = module, norm

    def __call__(self, x: Tensor) -> Tensor:
        weight_H = self.module.weight
        takes = device_rows.takes(x, weight_H)
        if takes and is_proven(RowKernel(x.device, x.dtype, x.shape[-1], self.norm.form)):
            return _Normalised.apply(x, weight_H, self.norm)  # type: ignore[no-any-return]
        return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]


class _GatedForward:
    """`forward` of one gated MLP."""

    def __init__(self, module: Any, gate: Gate) -> None:
        self.module, self.gate = module, gate

    def __call__(self, x: Tensor) -> Tensor:
        mlp = self.module
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        if device_rows.takes(gate, up) and is_proven(RowKernel(gate.device, gate.dtype, gate.shape[-1], self.gate)):
            return mlp.down_proj(_Gated.apply(gate, up, self.gate))  # type: ignore[no-any-return]
        return mlp.down_proj(mlp.act_fn(gate) * up)  # type: ignore[no-any-return]


class _Normalised(torch.autograd.Function):
    """An RMS norm of [..., H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, norm: Norm) -> Tensor:
        out_TH, inverse_T, ctx.launch = device_rows.normalised(_rows(x), weight_H.contiguous(), norm.eps, *norm.form)
        ctx.save_for_backward(x, weight_H, inverse_T)
        return unviewed(out_TH, x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_H, inverse_T = ctx.saved_tensors
        grad_TH, grad_weight_H = device_rows.normalised_backward(
            _rows(grad), _rows(x), weight_H.contiguous(), inverse_T, ctx.launch, needs_weight=ctx.needs_input_grad[1]
        )
        return grad_TH.view(x.shape), grad_weight_H, None


class _Gated(torch.autograd.Function):
    """activation(gate) · up of [..., I]."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, which: Gate) -> Tensor:
        gate_TI, up_TI = _rows(gate), _rows(up)
        ctx.which = which
        ctx.save_for_backward(gate, up)
        computes = device_rows.gated_silu if which is Gate.SILU else device_rows.gated_gelu
        return unviewed(computes(gate_TI, up_TI), gate.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        computes = device_rows.gated_silu_backward_ if ctx.which is Gate.SILU else device_rows.gated_gelu_backward_
        # Written over in the backward: products save what they are given, not what they give. Were one of these kept by
        # another node, or asked for again, torch would say so by its version.
        torch.autograd.graph.increment_version((gate, up))
        grad_gate, grad_up = computes(_rows(grad), _rows(gate), _rows(up))
        return grad_gate.view(gate.shape), grad_up.view(up.shape), None


def _rows(tensor: Tensor) -> Tensor:
    """[..., H] as [T, H], one row behind another."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()

"""Rotary positions by one kernel forward and one backward: in bfloat16 on a CPU, and on a GPU.

Families call a function of their file, `apply_rotary_pos_emb`. An attention layer whose function is shown to compute
what the kernels compute gets a `forward` of the same code that finds ours under that name: on a CPU for good, on a GPU
for as long as `layer_kernels` says. Nothing of Transformers is changed, and no attention layer is written again.

Shapes: T tokens, Hq query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from plait.kernels import device_rotation, fused_rows
from plait.models.compute.layer_forms import Rotation, rotation_of
from plait.models.compute.row_kernel_proof import RowKernel, is_proven

NAME = "apply_rotary_pos_emb"
Function = Callable[..., tuple[Tensor, Tensor]]


def install(module: nn.Module) -> None:
    """Let the attention layers of a module rotate here, where a CPU has kernels."""
    for layer in module.modules() if fused_rows.AVAILABLE else ():
        if "forward" not in vars(layer) and (forward := forward_of(layer)) is not None:
            layer.forward = forward


def forward_of(layer: nn.Module) -> MethodType | None:
    """`forward` of an attention layer with the rotation done by plait's kernel; None if the layer does not rotate, or
    not in the common way."""
    forward = type(layer).forward
    ours = _with_kernel(forward) if isinstance(forward, FunctionType) else None
    return None if ours is None else MethodType(ours, layer)


@functools.cache
def _with_kernel(forward: FunctionType) -> FunctionType | None:
    """A copy of a forward that rotates with plait's kernel; None if it calls no rotation, or an uncommon one.

    Decorators stay: if the function wraps another (`functools.wraps`), the copy is the wrapper around the other's copy.
    """
    inner = getattr(forward, "__wrapped__", None)
    if isinstance(inner, FunctionType):
        fused = _with_kernel(inner)
        cells = forward.__closure__ or ()
        closure = tuple(CellType(fused) if cell.cell_contents is inner else cell for cell in cells)
        if fused is None or closure == cells:
            return None
        copied = _copied(forward, forward.__globals__, closure)
        copied.__wrapped__ = fused
        return copied
    own = forward.__globals__.get(NAME) if NAME in forward.__code__.co_names else None
    if own is None or rotation_of(own) is None:
        return None
    return _copied(forward, {**forward.__globals__, NAME: functools.partial(rotated, own)}, forward.__closure__)


def _copied(function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> Any:
    """The same code with other globals and another closure."""
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    del copied.__wrapped__
    return copied


def rotated(own: Function, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
    """query [1, Hq, T, D] and key [1, Hkv, T, D], cos and sin [1, T, D]; what is of another form, such as cosines of a
    part of a head, goes to the family's own."""
    given = query, key, cos, sin
    if rest or options or not _is_row(*given):
        return own(*given, *rest, **options)
    if device_rotation.takes(*given):
        kind = RowKernel(query.device, query.dtype, query.shape[-1], Rotation.HALVES)
        return _DeviceRotation.apply(*given) if is_proven(kind) else own(*given)
    if fused_rows.takes(*given) and all(x.transpose(1, 2).is_contiguous() for x in (query, key)):
        cos_TD, sin_TD = cos[0].contiguous(), sin[0].contiguous()
        return _Rotation.apply(query, cos_TD, sin_TD)[None], _Rotation.apply(key, cos_TD, sin_TD)[None]
    return own(*given)


def _is_row(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether they are of one row, and cosines and sines of whole heads."""
    if query.ndim != 4 or key.ndim != 4 or len(query) != 1 or len(key) != 1:
        return False
    tokens, size = query.shape[2:]
    return key.shape[2:] == (tokens, size) and cos.shape == sin.shape == (1, tokens, size) and size % 2 == 0


class _Rotation(torch.autograd.Function):
    """Queries or keys, on a CPU; see `fused_rows.rotated`."""

    @staticmethod
    def forward(ctx: Any, x_1HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return fused_rows.rotated(x_1HTD.transpose(1, 2)[0], cos_TD, sin_TD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_HTD: Tensor) -> tuple[Tensor | None, ...]:
        grad_THD = fused_rows.rotated_backward(grad_HTD.contiguous(), *ctx.saved_tensors)
        return grad_THD[None].transpose(1, 2), None, None


class _DeviceRotation(torch.autograd.Function):
    """Queries and keys, on a GPU; see `device_rotation.rotated`."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return device_rotation.rotated(query, key, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        return *device_rotation.rotated_backward(grad_query, grad_key, *ctx.saved_tensors), None, None

"""Rotary positions on a CPU in bfloat16: one pass in place of five operations, equal to the bit, and one backward.

Families call a function of their file, `apply_rotary_pos_emb`. An attention layer whose function is shown to compute
what the kernel computes gets a `forward` of the same code that finds ours under that name; nothing of Transformers is
changed, and no attention layer is written again.

Shapes: T tokens, Hq heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from plait.kernels import fused_rows

NAME = "apply_rotary_pos_emb"
Rotation = Callable[..., tuple[Tensor, Tensor]]


def install(module: nn.Module) -> None:
    """Let the attention layers of a module whose rotation is shown to be the common one rotate here."""
    for layer in module.modules():
        forward = type(layer).forward
        if "forward" in vars(layer) or not isinstance(forward, FunctionType):
            continue
        if fused_rows.AVAILABLE and (fused := _with_kernel(forward)) is not None:
            layer.forward = MethodType(fused, layer)


@functools.cache
def _with_kernel(forward: FunctionType) -> FunctionType | None:
    """The same code with another rotation; None where it calls none, or its own is not the common one.

    Decorators stay: of a function that wraps another (`functools.wraps`) it is the wrapper's code around the other's.
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
    if own is None or not is_common(own):
        return None
    return _copied(forward, {**forward.__globals__, NAME: functools.partial(rotated, own)}, forward.__closure__)


def _copied(function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None) -> Any:
    """The same code with other globals and another closure."""
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    del copied.__wrapped__
    return copied


def rotated(own: Rotation, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
    """query and key [1, Hq, T, D], cos and sin [1, T, D]; whatever is of another form goes to the family's own."""
    like = fused_rows.takes(query, key, cos, sin) and not rest and not options
    size = query.shape[-1]
    if like and all(_is_row(x) for x in (query, key)) and cos.shape == (1, query.shape[2], size) and size % 2 == 0:
        cos_TD, sin_TD = cos[0].contiguous(), sin[0].contiguous()
        return _Rotation.apply(query, cos_TD, sin_TD)[None], _Rotation.apply(key, cos_TD, sin_TD)[None]
    return own(query, key, cos, sin, *rest, **options)


def _is_row(x: Tensor) -> bool:
    """Whether it is one row, the heads of a token side by side, as a projection leaves them."""
    return x.ndim == 4 and x.shape[0] == 1 and x.transpose(1, 2).is_contiguous()


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_1HTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return fused_rows.rotated(x_1HTD.transpose(1, 2)[0], cos_TD, sin_TD)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_HTD: Tensor) -> tuple[Tensor | None, ...]:
        grad_THD = fused_rows.rotated_backward(grad_HTD.contiguous(), *ctx.saved_tensors)
        return grad_THD[None].transpose(1, 2), None, None


@functools.cache
def is_common(own: Rotation) -> bool:
    """Whether it rotates queries and keys as the kernel does, to the bit, with any cosines and sines."""
    generator = torch.Generator().manual_seed(0)
    query_1THD, key_1THD, angles = (
        torch.randn(shape, generator=generator, device="cpu").bfloat16()
        for shape in ((1, 5, 3, 8), (1, 5, 1, 8), (2, 1, 5, 8))
    )
    query, key = query_1THD.transpose(1, 2), key_1THD.transpose(1, 2)
    ours = rotated(own, query, key, *angles)
    try:
        return all(map(torch.equal, own(query, key, *angles), ours))
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError):
        return False

"""Float64 all through: Transformers' modules cast to float32 inside norms, softmax and routers, whatever the dtype.

With those casts two ways to compute one float64 forward differ by about 1e-7, and so would two placements of a run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def kept_float64(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """For the forward of a model that computes in this dtype: within it float64 is never narrowed to float32."""
    return _KeptFloat64() if dtype is torch.float64 else nullcontext()


class _KeptFloat64(TorchFunctionMode):
    """`.float()`, `.to(float32)` and `dtype=float32` leave a float64 tensor as it is. What else became float32 on the
    way, as positions do, may be multiplied with it by `@`, too, as by `*`: the result is float64.

    Every operation and every look at a tensor's shape or dtype comes by here: what names no float32 goes on at once.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _FLOAT and _is_float64(args):
            return args[0]
        if func in _PRODUCTS:
            args = _alike(args)
        if kwargs:
            for value in kwargs.values():
                if value is _FLOAT32 and _is_float64(args):
                    kwargs = {name: torch.float64 if one is _FLOAT32 else one for name, one in kwargs.items()}
                    break
        for value in args:
            if value is _FLOAT32 and _is_float64(args):
                args = tuple(torch.float64 if one is _FLOAT32 else one for one in args)
                break
        return func(*args, **kwargs) if kwargs else func(*args)


_FLOAT, _FLOAT32 = torch.Tensor.float, torch.float32
_PRODUCTS = frozenset((torch.Tensor.matmul, torch.matmul))
"""Products of matrices, which torch refuses where the two are of different dtypes."""


def _is_float64(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64


def _alike(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The two factors, both float64 if one is and the other float32."""
    if {one.dtype for one in args if isinstance(one, torch.Tensor)} == {_FLOAT32, torch.float64}:
        return tuple(one.double() for one in args)
    return args

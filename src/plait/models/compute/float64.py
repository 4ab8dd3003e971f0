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
    """`.float()`, `.to(float32)` and `dtype=float32` leave a float64 tensor as it is."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)

"""Float64 all through: Transformers' modules cast to float32 inside norms and softmax, whatever the model's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ExactFloat64(TorchFunctionMode):
    """Within it a float64 tensor is never narrowed to float32: `.float()`, `.to(float32)` and `dtype=float32` keep it.

    Without it two ways to compute the same float64 forward differ by about 1e-7, the rounding of those casts.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)

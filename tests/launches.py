"""What would be launched on a GPU, and waited for, found on tensors that hold nothing: those of the device `meta`.

Whatever asks such a tensor for a number raises by itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("meta")


class Uploads(TorchFunctionMode):
    """Finds tensors that are made of numbers of the host right on the device: these may be paged out, so the host waits
    until they are there."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        makes = func in (torch.tensor, torch.as_tensor, Tensor.new_tensor)
        if makes and out.device == GPU and (func is Tensor.new_tensor or not isinstance(args[0], Tensor)):
            self._found.append(f"{func} of shape {tuple(out.shape)}")
        return out


class Launches(TorchDispatchMode):
    """Counts what would be a kernel or a copy, and finds copies between host and device that would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.waited: list[str] = []
        self._uploads = Uploads(self.waited)

    def __enter__(self) -> Launches:
        self._uploads.__enter__()
        return super().__enter__()

    def __exit__(self, *of: Any) -> None:
        super().__exit__(*of)
        self._uploads.__exit__(*of)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, Tensor) else None
        if found is None or found.device != GPU or func.is_view:
            return out
        self.counts[str(func)] += 1
        flat = pytree.tree_leaves((args, kwargs or {}))
        of_host = [one for one in flat if isinstance(one, Tensor) and one.device != GPU and one.dim()]
        uploads = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("non_blocking")
        if of_host and not uploads:
            self.waited.append(f"{func} of {[tuple(one.shape) for one in of_host]}")
        return out

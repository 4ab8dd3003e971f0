"""How much memory tensors take that are made while somebody looks, whoever makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Within it every storage that an operator returns is counted as long as it lives, but for those of `known`."""

    def __init__(self, known: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known.values()}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._live.values()))
        return out

"""The buffers of an idle role in host memory: offload and onload, as moves from one buffer to another.

The device's memory is freed under the tensors, not with them: parameters that are views of a flat buffer stay views of
it, and are whole again after the onload.

On a CPU, memory that numpy has seen once cannot be resized any more (its arrays would be left hanging): there the pages
are given back to the system, and the addresses stay.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from plait.layout.boxes import Box
from plait.layout.holdings import packed
from plait.layout.mesh import Cluster
from plait.layout.move import BUCKET_BYTES, plan_move
from plait.layout.move_plan import MovePlan
from plait.layout.params import Param
from plait.reallocation.memory import DTYPES
from plait.reallocation.mover import moving
from plait.schedule.work import Work

_GIVES_BACK = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HostMemory:
    """Where the buffers of one role are while it is idle.

    Args:
        buffers: by name, flat [elements]; each the only user of its storage.
        scratch: further ones, whose values nobody reads after a pause (gradients): freed without a copy, zeros then.
        keep: keep the copy in host memory after an onload, so that a role which does not change (a reference, a reward
            model) is copied out once only.
        name: of the role, for records and errors.
    """

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        *,
        scratch: Mapping[str, Tensor] | None = None,
        keep: bool = False,
        name: str = "offload",
    ) -> None:
        self._buffers = dict(buffers)
        self._scratch = dict(scratch or {})
        for key, buffer in (self._buffers | self._scratch).items():
            size = buffer.untyped_storage().nbytes()
            assert size == buffer.numel() * buffer.itemsize, f"{name}: buffer {key} is a part of a larger storage"
            can_be_freed = buffer.untyped_storage().resizable() or buffer.device.type == "cpu"
            assert can_be_freed, f"{name}: the storage of buffer {key} cannot be freed"
        self._keep = keep
        self._name = name
        self._copies: dict[str, Tensor] = {}
        self._away: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers, scratch included."""
        return (*self._buffers, *self._scratch)

    @property
    def is_away(self) -> bool:
        """Whether some buffer has no memory on its device."""
        return bool(self._away)

    @property
    def is_dropped(self) -> bool:
        """Whether the values of some buffer are nowhere."""
        return any(key in self._away and key not in self._copies for key in self._buffers)

    @property
    def device_bytes(self) -> int:
        """That the buffers take up on their device now."""
        buffers = self._buffers | self._scratch
        return sum(buffer.untyped_storage().nbytes() for key, buffer in buffers.items() if key not in self._away)

    def now(self, buffer: Tensor) -> Tensor | None:
        """The values of one of the buffers, in its shape and dtype, wherever they are; None where they are nowhere."""
        key = next((key for key, kept in self._buffers.items() if kept is buffer), None)
        if key is None or key not in self._away:
            return buffer
        return self._copies.get(key)

    def offloading(self, *, bucket_bytes: int = BUCKET_BYTES) -> Work[None]:
        """Copy the buffers to host memory, at most a bucket per `next()`, and free each when it is there.

        What an earlier offload left there is not copied again. Until the onload nobody may touch the tensors.
        """
        assert not self._away, f"{self._name}: is offloaded already"
        self._free(self._scratch)
        for key, buffer in self._buffers.items():
            if key not in self._copies:
                copy = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=buffer.device.type == "cuda")
                yield from self._copying(f"offload/{key}", buffer, copy, bucket_bytes)
                self._copies[key] = copy
            self._free({key: buffer})

    def onloading(self) -> Work[None]:
        """Give the buffers memory again and copy them back, at most a bucket per `next()`."""
        assert not self.is_dropped, f"{self._name}: what was dropped has to be moved anew"
        for key in [key for key in self._buffers if key in self._away]:
            buffer = self._buffers[key]
            _give_memory(buffer)
            yield from self._copying(f"onload/{key}", self._copies[key], buffer, BUCKET_BYTES)
            self._away.remove(key)
            if not self._keep:
                del self._copies[key]
        self._give_zeros(self._scratch)

    def drop(self) -> None:
        """Free all buffers and their copies: what they hold is moved here anew before it is used again."""
        self._copies.clear()
        self._free(self._buffers | self._scratch)

    def allocate(self) -> None:
        """Give what is away memory again, filled with zeros: something else is about to write the values."""
        self._give_zeros(self._buffers | self._scratch)  # gaps between blocks are written by nothing
        self._copies.clear()

    def _free(self, buffers: Mapping[str, Tensor]) -> None:
        for key, buffer in buffers.items():
            self._away.add(key)
            storage = buffer.untyped_storage()
            if storage.resizable():
                storage.resize_(0)
            else:
                _give_back_pages(storage)

    def _give_zeros(self, buffers: Mapping[str, Tensor]) -> None:
        for key in [key for key in buffers if key in self._away]:
            _give_memory(buffers[key])
            buffers[key].zero_()
            self._away.remove(key)

    def _copying(self, what: str, source: Tensor, target: Tensor, bucket_bytes: int) -> Work[None]:
        plan = _plan(source.numel(), _NAMES[source.dtype], bucket_bytes)
        work = moving(plan, 0, {"from": source, "to": target}, name=f"{self._name}.{what}")
        kind = what.split("/")[0].upper()
        for done in work:
            yield done and replace(done, kind=kind)


def _give_memory(buffer: Tensor) -> None:
    storage, num_bytes = buffer.untyped_storage(), buffer.numel() * buffer.itemsize
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)


def _give_back_pages(storage: torch.UntypedStorage) -> None:
    """All pages that lie in CPU memory as a whole; their values are lost, and they come back when they are written."""
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > 0:
        failed = ctypes.CDLL(None, use_errno=True).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _GIVES_BACK)
        assert not failed, f"{size} bytes of memory cannot be given back: error {ctypes.get_errno()}"


def _plan(num_elements: int, dtype: str, bucket_bytes: int) -> MovePlan:
    """From one buffer into another as a whole, in copies of a bucket."""
    params = (Param("buffer", (num_elements,)),)
    whole = {0: [(0, Box(0, 1, 0, 1, 0, num_elements))]}
    source, target = (packed(params, dtype, whole, name) for name in ("from", "to"))
    return plan_move(source, target, Cluster(1, 1), bucket_bytes=bucket_bytes)

"""Weights in memory that two processes share, with a hash of what was written and one of what was read.

The memory is a file without a name, which the reader opens through `/proc`: when both have let go of it, however they
ended, it is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from plait.vllm.messages import StoredTensor, StoredWeights

_ALIGNED = 64


@contextlib.contextmanager
def shared(state: dict[str, Tensor]) -> Iterator[tuple[StoredWeights, str]]:
    """Within it others can read these weights: where they lie, and their hash. A tensor of two names is written once.

    Args:
        state: on the CPU, of any shapes and dtypes; emptied, so that nothing lies in memory twice.

    Raises:
        OSError: there is no memory for them.
    """
    fd = os.memfd_create("plait-weights")
    try:
        tensors, digest, end, starts = [], hashlib.sha256(), 0, dict[int, int]()
        for name in list(state):
            tensor = state.pop(name)
            start = starts.get(tensor.data_ptr())
            if start is None or not tensor.numel():
                start = starts[tensor.data_ptr()] = -(-end // _ALIGNED) * _ALIGNED
                end = start + tensor.numel() * tensor.element_size()
                os.ftruncate(fd, end)
                _write(fd, tensor, start)
            stored = StoredTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)
            _add(digest, stored, tensor)
            tensors.append(stored)
        yield StoredWeights(os.getpid(), fd, end, tuple(tensors)), digest.hexdigest()
    finally:
        os.close(fd)


class SharedReader:
    """Reads what `shared` wrote, tensor by tensor, and hashes what it has read."""

    def __init__(self, stored: StoredWeights) -> None:
        self._stored = stored
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        stored = self._stored
        with open(f"/proc/{stored.pid}/fd/{stored.fd}", "rb") as file:
            # Private pages that could be written: torch warns of memory that cannot be.
            memory = mmap.mmap(file.fileno(), stored.num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        for entry in stored.tensors:
            dtype, count = getattr(torch, entry.dtype), math.prod(entry.shape)
            tensor = torch.empty(entry.shape, dtype=dtype)
            if count:
                tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.start).reshape(entry.shape)
            _add(self._digest, entry, tensor)
            yield entry.name, tensor

    def digest(self) -> str:
        """The hash of all that was read so far."""
        return self._digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _write(fd: int, tensor: Tensor, start: int) -> None:
    unwritten = _bytes_of(tensor)
    while len(unwritten):
        written = os.pwrite(fd, unwritten, start)
        unwritten, start = unwritten[written:], start + written


def _add(digest: hashlib._Hash, stored: StoredTensor, tensor: Tensor) -> None:
    digest.update(f"{stored.name} {stored.dtype} {stored.shape}\n".encode())
    digest.update(_bytes_of(tensor))

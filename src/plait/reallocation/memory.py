"""Flat buffers by name, strided parts of them, and the staging memory of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plait.layout.boxes import Slice
from plait.layout.holdings import Holdings

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
"""By their names in `layout.holdings.ITEM_BYTES`."""


def allocate(holdings: Holdings, rank: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The buffers of a rank, [elements] each, filled with zeros (which the gaps between blocks keep)."""
    sizes = holdings.buffers.get(rank, {})
    return {name: torch.zeros(size, dtype=DTYPES[holdings.dtype], device=device) for name, size in sizes.items()}


def part(buffer: Tensor, piece: Slice) -> Tensor:
    """The elements of a slice, in its shape, sharing memory with the buffer [elements]."""
    last = piece.offset + sum((extent - 1) * step for extent, step in zip(piece.shape, piece.strides, strict=True))
    assert 0 <= piece.offset <= last < buffer.numel(), f"{piece} lies outside a buffer of {buffer.numel()} elements"
    return buffer.as_strided(piece.shape, piece.strides, buffer.storage_offset() + piece.offset)


def runs(pieces: Sequence[Slice]) -> list[Slice]:
    """The same elements in the same order, with neighbours in the buffer made one."""
    slices: list[Slice] = []
    for piece in pieces:
        if slices and _follows(slices[-1], piece):
            slices[-1] = _joined(slices[-1], piece)
        else:
            slices.append(piece)
    return slices


def paired_runs(sources: Sequence[Slice], targets: Sequence[Slice]) -> list[tuple[Slice, Slice]]:
    """The same copies in the same order, with those whose two ends are both neighbours made one."""
    slices: list[tuple[Slice, Slice]] = []
    for source, target in zip(sources, targets, strict=True):
        if slices and _follows(slices[-1][0], source) and _follows(slices[-1][1], target):
            slices[-1] = _joined(slices[-1][0], source), _joined(slices[-1][1], target)
        else:
            slices.append((source, target))
    return slices


def _follows(piece: Slice, other: Slice) -> bool:
    """Whether both are contiguous and `other` begins where `piece` ends."""
    return (
        piece.buffer == other.buffer
        and piece.strides == other.strides == (1,)
        and piece.offset + piece.shape[0] == other.offset
    )


def _joined(piece: Slice, other: Slice) -> Slice:
    return piece._replace(shape=(piece.shape[0] + other.shape[0],))


def gather(buffers: Mapping[str, Tensor], pieces: Sequence[Slice], message: Tensor) -> None:
    """Copy parts of buffers into a message [elements], one after another, each row-major."""
    start = 0
    for piece in pieces:
        stop = start + piece.num_elements
        message[start:stop].view(piece.shape).copy_(part(buffers[piece.buffer], piece))
        start = stop


def scatter(message: Tensor, buffers: Mapping[str, Tensor], pieces: Sequence[Slice]) -> None:
    """Copy a message [elements] into parts of buffers: the inverse of `gather`."""
    start = 0
    for piece in pieces:
        stop = start + piece.num_elements
        part(buffers[piece.buffer], piece).copy_(message[start:stop].view(piece.shape))
        start = stop


class Staging:
    """Memory for the messages of one direction: never more than `limit` elements, used again and again.

    New memory costs the system about as much time as the message it is for, so what is given back is kept.
    """

    def __init__(self, limit: int, dtype: torch.dtype, device: torch.device) -> None:
        self._limit = limit
        self._dtype = dtype
        self._device = device
        self._free: list[Tensor] = []
        self._allocated = 0

    def take(self, num_elements: int) -> Tensor | None:
        """Memory [num_elements]; None if it would exceed the limit together with the memory in use."""
        fitting = [index for index, memory in enumerate(self._free) if memory.numel() >= num_elements]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))
            return memory[:num_elements]
        while self._free and self._allocated + num_elements > self._limit:
            self._allocated -= self._free.pop().numel()
        if self._allocated + num_elements > self._limit:
            return None
        self._allocated += num_elements
        return torch.empty(num_elements, dtype=self._dtype, device=self._device)

    def give_back(self, memory: Tensor) -> None:
        """Memory [elements] of `take` that is not in use any more."""
        whole = memory.untyped_storage().nbytes() // memory.itemsize
        self._free.append(memory.as_strided((whole,), (1,), 0))

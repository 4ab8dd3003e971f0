"""Boxes of a parameter's elements, and where in a flat buffer they lie."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from plait.layout.params import Block


class Box(NamedTuple):
    """Half-open ranges of the three dims of `Param.grid`."""

    outer: int
    outer_stop: int
    start: int
    stop: int
    inner: int
    inner_stop: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self[1] - self[0], self[3] - self[2], self[5] - self[4]

    @property
    def num_elements(self) -> int:
        return (self[1] - self[0]) * (self[3] - self[2]) * (self[5] - self[4])

    def holds(self, other: Box) -> bool:
        return (
            self[0] <= other[0]
            and other[1] <= self[1]
            and self[2] <= other[2]
            and other[3] <= self[3]
            and self[4] <= other[4]
            and other[5] <= self[5]
        )


class Slice(NamedTuple):
    """Elements of one buffer, visited row-major over `shape`: element (i, j, k) is at offset + i*s0 + j*s1 + k*s2."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        number = 1
        for extent in self.shape:
            number *= extent
        return number

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The half-open element ranges of the buffer, in the order in which they are visited."""
        if len(self.shape) == 1 and self.strides[0] == 1:
            yield self.offset, self.offset + self.shape[0]
            return
        for index in range(self.shape[0]):
            at = self.offset + index * self.strides[0]
            if len(self.shape) == 1:
                yield at, at + 1
            else:
                yield from Slice(self.buffer, at, self.shape[1:], self.strides[1:]).ranges()


class Holding(NamedTuple):
    """A box of parameter number `param` and where it lies in `buffer`."""

    param: int
    box: Box
    buffer: str
    offset: int
    strides: tuple[int, int, int]

    def at(self, box: Box) -> Slice:
        """Where a box inside this one lies; dims that lie close together are made one."""
        shape, (strides,) = _joined(box.shape, (self.strides,))
        return Slice(self.buffer, self.first(box), shape, strides)

    def first(self, box: Box) -> int:
        """Where the first element of a box inside this one lies."""
        (o0, _, w0, _, i0, _), (s0, s1, s2) = self.box, self.strides
        return self.offset + (box[0] - o0) * s0 + (box[2] - w0) * s1 + (box[4] - i0) * s2


def aligned_slices(one: Holding, other: Holding, box: Box) -> tuple[Slice, Slice]:
    """Where a box lies in each of two holdings, both in the same shape."""
    shape, (mine, yours) = _joined(box.shape, (one.strides, other.strides))
    return Slice(one.buffer, one.first(box), shape, mine), Slice(other.buffer, other.first(box), shape, yours)


@lru_cache(maxsize=4096)
def _joined(
    extents: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Leave out dims of length 1 and join neighbours that lie close together under every one of the strides."""
    shape: list[int] = []
    joined: list[list[int]] = [[] for _ in strides]
    for extent, *steps in zip(extents, *strides, strict=True):
        if extent == 1:
            continue
        if shape and all(mine[-1] == extent * step for mine, step in zip(joined, steps, strict=True)):
            shape[-1] *= extent
            for mine, step in zip(joined, steps, strict=True):
                mine[-1] = step
        else:
            shape.append(extent)
            for mine, step in zip(joined, steps, strict=True):
                mine.append(step)
    return tuple(shape) or (1,), tuple(tuple(mine) or (1,) for mine in joined)


def block_boxes(block: Block) -> list[Box]:
    """A block as boxes, in the order in which they are stored; several where it is a range of each of several sections
    (`Block.ranges`)."""
    outer, _, inner = block.param.grid
    return [Box(0, outer, start, stop, 0, inner) for start, stop in block.ranges]


def dense_strides(box: Box) -> tuple[int, int, int]:
    """Strides of a box that is stored by itself, row-major."""
    _, width, inner = box.shape
    return width * inner, inner, 1


def boxes_of_range(box: Box, low: int, high: int) -> list[Box]:
    """The elements [low, high) of a box in row-major order, as at most five boxes in that order."""
    if low >= high:
        return []
    if (low, high) == (0, box.num_elements):
        return [box]
    for dim in range(3):
        lengths = box.shape
        if lengths[dim] == 1 and dim < 2:
            continue
        unit = 1
        for extent in lengths[dim + 1 :]:
            unit *= extent
        first, last = low // unit, (high - 1) // unit
        if first == last and unit > 1:
            return boxes_of_range(_narrow(box, dim, first, first + 1), low - first * unit, high - first * unit)
        boxes = []
        whole_from, whole_to = -(-low // unit), high // unit
        if low % unit:
            row = _narrow(box, dim, first, first + 1)
            boxes += boxes_of_range(row, low - first * unit, unit)
        if whole_from < whole_to:
            boxes.append(_narrow(box, dim, whole_from, whole_to))
        if high % unit:
            row = _narrow(box, dim, last, last + 1)
            boxes += boxes_of_range(row, 0, high - last * unit)
        return boxes
    return []


def _narrow(box: Box, dim: int, first: int, stop: int) -> Box:
    ranges = list(box)
    ranges[2 * dim], ranges[2 * dim + 1] = box[2 * dim] + first, box[2 * dim] + stop
    return Box(*ranges)

"""Who holds what, where: the common form of weights, optimizer state, rows, keys and values, and files.

A parameter is a grid of three dims (`Param.grid`): outside, along and inside its cut dim. A *box* is a range of each. A
*holding* is a box of a parameter together with where its elements lie: a buffer, an offset and three strides, in
elements. Whatever can be said this way can be moved by the one planner of `layout.move`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from plait.errors import LayoutError
from plait.layout.mesh import Layout
from plait.layout.params import Block, FlatLayout, Param, Parameters, aligned
from plait.layout.shards import shard, zero_range

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


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

    def meets(self, other: Box) -> bool:
        return (
            max(self[0], other[0]) < min(self[1], other[1])
            and max(self[2], other[2]) < min(self[3], other[3])
            and max(self[4], other[4]) < min(self[5], other[5])
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


@dataclass(frozen=True)
class Holdings:
    """What every rank holds of a list of parameters, all in one dtype.

    params:  what `Holding.param` counts; source and target of a move have the same list
    dtype:   of the elements in the buffers
    ranks:   rank → its holdings; a rank that is not there holds nothing
    buffers: rank → name → length in elements; other holdings may live in the same buffers
    """

    params: tuple[Param, ...]
    dtype: str
    ranks: Mapping[int, tuple[Holding, ...]]
    buffers: Mapping[int, Mapping[str, int]]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(f"dtype: expected one of {', '.join(ITEM_BYTES)}, found {self.dtype!r}")

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def num_bytes(self, rank: int) -> int:
        """Of the buffers of a rank."""
        return sum(self.buffers.get(rank, {}).values()) * self.item_bytes

    @cached_property
    def by_param(self) -> tuple[tuple[tuple[int, Box], ...], ...]:
        """For each parameter the (rank, box) of all its holdings, ranks ascending."""
        lists: list[list[tuple[int, Box]]] = [[] for _ in self.params]
        for rank in sorted(self.ranks):
            for holding in self.ranks[rank]:
                lists[holding.param].append((rank, holding.box))
        return tuple(map(tuple, lists))

    @cached_property
    def _of(self) -> dict[tuple[int, int], list[Holding]]:
        index: dict[tuple[int, int], list[Holding]] = {}
        for rank, held in self.ranks.items():
            for holding in held:
                index.setdefault((rank, holding.param), []).append(holding)
        return index

    def find(self, rank: int, param: int, box: Box) -> list[Holding]:
        """Every holding of a rank that has this box; empty where it has none."""
        return [holding for holding in self._of.get((rank, param), ()) if holding.box.holds(box)]


def merged(parts: Sequence[Holdings]) -> Holdings:
    """All of several holdings of the same parameters and dtype; their buffers are told apart by name or rank."""
    ranks: dict[int, tuple[Holding, ...]] = {}
    buffers: dict[int, dict[str, int]] = {}
    for part in parts:
        assert part.params == parts[0].params, "holdings of different parameters do not merge"
        assert part.dtype == parts[0].dtype, "holdings of different dtypes do not merge"
        for rank, held in part.ranks.items():
            ranks[rank] = ranks.get(rank, ()) + held
        for rank, sizes in part.buffers.items():
            mine = buffers.setdefault(rank, {})
            for name, size in sizes.items():
                assert mine.get(name, size) == size, f"two buffers {name} of different length on rank {rank}"
                mine[name] = size
    return Holdings(parts[0].params, parts[0].dtype, ranks, buffers)


def block_box(block: Block) -> Box:
    outer, _, inner = block.param.grid
    return Box(0, outer, block.start, block.stop, 0, inner)


def dense_strides(box: Box) -> tuple[int, int, int]:
    """Of a box that is stored by itself, row-major."""
    _, width, inner = box.shape
    return width * inner, inner, 1


def weights(parameters: Parameters, layout: Layout, dtype: str, buffer: str = "weights") -> Holdings:
    """Working weights of a layout: on each rank one flat buffer as of `shards.shard`."""
    index = {param.name: number for number, param in enumerate(parameters.params)}
    cache: dict[tuple[int, int], tuple[tuple[Holding, ...], int]] = {}
    ranks, buffers = {}, {}
    for rank in layout.mesh.ranks:
        place = layout.coordinates(rank)
        if (place.tp, place.pp) not in cache:
            flat = shard(parameters, layout.parallelism, place.tp, place.pp)
            cache[place.tp, place.pp] = (flat_holdings(flat, index, buffer), flat.num_elements)
        ranks[rank], size = cache[place.tp, place.pp]
        buffers[rank] = {buffer: size}
    return Holdings(parameters.params, dtype, ranks, buffers)


def flat_holdings(flat: FlatLayout, index: Mapping[str, int], buffer: str) -> tuple[Holding, ...]:
    """The blocks of one flat buffer. `index` is the number of each parameter."""
    found = []
    for block, start, _ in flat.entries:
        box = block_box(block)
        found.append(Holding(index[block.param.name], box, buffer, start, dense_strides(box)))
    return tuple(found)


def zero_shards(parameters: Parameters, layout: Layout, dtype: str, buffer: str = "masters") -> Holdings:
    """Masters (or moments) under ZeRO-1: of the flat buffer of each (tp, pp), every dp rank has one equal range.

    A tied parameter is on the first stage that holds it only. Source: ZeRO, arXiv 1910.02054, section 5 (P_os).
    """
    index = {param.name: number for number, param in enumerate(parameters.params)}
    ranks, buffers = {}, {}
    for rank in layout.mesh.ranks:
        place = layout.coordinates(rank)
        flat = shard(parameters, layout.parallelism, place.tp, place.pp, once=True)
        low, high = zero_range(flat.num_elements, place.dp, layout.parallelism.dp)
        found = []
        for block, start, stop in flat.entries:
            if start < high and low < stop:
                whole = block_box(block)
                strides = dense_strides(whole)
                held = Holding(index[block.param.name], whole, buffer, start - low, strides)
                for box in boxes_of_range(whole, max(low, start) - start, min(high, stop) - start):
                    found.append(held._replace(box=box, offset=held.first(box)))
        ranks[rank] = tuple(found)
        buffers[rank] = {buffer: high - low}
    return Holdings(parameters.params, dtype, ranks, buffers)


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
        found = []
        whole_from, whole_to = -(-low // unit), high // unit
        if low % unit:
            row = _narrow(box, dim, first, first + 1)
            found += boxes_of_range(row, low - first * unit, unit)
        if whole_from < whole_to:
            found.append(_narrow(box, dim, whole_from, whole_to))
        if high % unit:
            row = _narrow(box, dim, last, last + 1)
            found += boxes_of_range(row, 0, high - last * unit)
        return found
    return []


def _narrow(box: Box, dim: int, first: int, stop: int) -> Box:
    ranges = list(box)
    ranges[2 * dim], ranges[2 * dim + 1] = box[2 * dim] + first, box[2 * dim] + stop
    return Box(*ranges)


def packed(
    params: tuple[Param, ...], dtype: str, boxes: Mapping[int, Iterable[tuple[int, Box]]], buffer: str
) -> Holdings:
    """(parameter number, box) of each rank, one after another in one buffer."""
    ranks, buffers = {}, {}
    for rank, held in boxes.items():
        found, end = [], 0
        for number, box in held:
            found.append(Holding(number, box, buffer, end, dense_strides(box)))
            end += aligned(box.num_elements)
        ranks[rank] = tuple(found)
        buffers[rank] = {buffer: end}
    return Holdings(params, dtype, ranks, buffers)

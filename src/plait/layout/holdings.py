"""Who holds what, where: the common form of weights, optimizer state, rows, keys and values, and files.

A parameter is a grid of three dims (`Param.grid`): outside, along and inside its cut dim. A *box* is a range of each. A
*holding* is a box of a parameter together with where its elements lie: a buffer, an offset and three strides, in
elements. Whatever can be said this way can be moved by the one planner of `layout.move`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from plait.errors import LayoutError
from plait.layout.boxes import Box, Holding, block_boxes, boxes_of_range, dense_strides
from plait.layout.mesh import Layout
from plait.layout.params import FlatLayout, Param, Parameters, aligned
from plait.layout.shards import shard, zero_range

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}


@dataclass(frozen=True)
class Holdings:
    """What every rank holds of a list of parameters, all in one dtype.

    params:  what `Holding.param` counts; source and target of a move have the same list
    dtype:   of the elements in the buffers
    ranks:   rank → its holdings; a rank that is not there holds nothing
    buffers: rank → name → length in elements; other holdings may live in the same buffers

    Raises:
        LayoutError: the dtype is none of ITEM_BYTES.
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
        for rank, holdings in self.ranks.items():
            for holding in holdings:
                index.setdefault((rank, holding.param), []).append(holding)
        return index

    def may_double(self, rank: int) -> bool:
        """Whether a rank may hold an element in two places: a parameter in several holdings."""
        found = [holding.param for holding in self.ranks.get(rank, ())]
        return len(found) > len(set(found))

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
        for rank, holdings in part.ranks.items():
            ranks[rank] = ranks.get(rank, ()) + holdings
        for rank, sizes in part.buffers.items():
            mine = buffers.setdefault(rank, {})
            for name, size in sizes.items():
                assert mine.get(name, size) == size, f"two buffers {name} of different length on rank {rank}"
                mine[name] = size
    return Holdings(parts[0].params, parts[0].dtype, ranks, buffers)


def weights(parameters: Parameters, layout: Layout, dtype: str, buffer: str = "weights") -> Holdings:
    """Working weights of a layout: on each rank one flat buffer as of `shards.shard`, or, where dp shares them, what
    the rank has of it as of `zero_shards`."""
    if layout.shards_weights:
        return zero_shards(parameters, layout, dtype, buffer)
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
    """The blocks of one flat buffer, of each its boxes one behind another. `index` is the number of each parameter."""
    holdings = []
    for block, start, _ in flat.entries:
        for box in block_boxes(block):
            holdings.append(Holding(index[block.param.name], box, buffer, start, dense_strides(box)))
            start += box.num_elements
    return tuple(holdings)


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
        shards = []
        for whole in flat_holdings(flat, index, buffer):
            start, stop = whole.offset, whole.offset + whole.box.num_elements
            if start < high and low < stop:
                holding = whole._replace(offset=start - low)
                for box in boxes_of_range(whole.box, max(low, start) - start, min(high, stop) - start):
                    shards.append(holding._replace(box=box, offset=holding.first(box)))
        ranks[rank] = tuple(shards)
        buffers[rank] = {buffer: high - low}
    return Holdings(parameters.params, dtype, ranks, buffers)


def packed(
    params: tuple[Param, ...], dtype: str, boxes: Mapping[int, Iterable[tuple[int, Box]]], buffer: str
) -> Holdings:
    """(parameter number, box) of each rank, one after another in one buffer."""
    ranks, buffers = {}, {}
    for rank, boxes_of_rank in boxes.items():
        pieces, end = [], 0
        for number, box in boxes_of_rank:
            pieces.append(Holding(number, box, buffer, end, dense_strides(box)))
            end += aligned(box.num_elements)
        ranks[rank] = tuple(pieces)
        buffers[rank] = {buffer: end}
    return Holdings(params, dtype, ranks, buffers)

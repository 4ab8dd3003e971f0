"""Two layouts in one memory: where a block of one lies inside a block of the other, it is a view of it.

A rank that trains with a block and generates with a larger one that contains it keeps the larger one only. Blocks cut
along their first dim nest as contiguous ranges, all others as strided views; neither is ever copied between the two.
Source: the 3D-HybridEngine of HybridFlow (arXiv 2409.19256, section 5), without its condition on parallelism sizes.
"""

from __future__ import annotations

from plait.layout.holdings import Holding, Holdings, dense_strides
from plait.layout.params import aligned


def nested(first: Holdings, second: Holdings, buffer: str) -> tuple[Holdings, Holdings]:
    """The same holdings, on each rank in one buffer of this name.

    Blocks that hold others come first, those of `second` before those of `first`, each contiguous. Where all blocks of
    `first` lie inside blocks of `second`, the buffer is as long as that of `second` alone.

    Returns:
        (first, second) with their new places.
    """
    assert first.params == second.params, "holdings of different parameters do not nest"
    assert first.dtype == second.dtype, f"{first.dtype} and {second.dtype} do not nest"
    ones: dict[int, tuple[Holding, ...]] = {}
    others: dict[int, tuple[Holding, ...]] = {}
    lengths: dict[int, dict[str, int]] = {}
    for rank in sorted({*first.ranks, *second.ranks}):
        mine, yours = first.ranks.get(rank, ()), second.ranks.get(rank, ())
        room = _Room(buffer)
        hosts = {held: host for held in yours if (host := _host(held, mine)) and host.box != held.box}
        guests = {held: host for held in mine if (host := _host(held, yours))}
        for held in yours:
            if held not in hosts:
                room.settle(held)
        for held in mine:
            if held not in guests:
                room.settle(held)
        ones[rank] = tuple(room.view(held, guests.get(held, held)) for held in mine)
        others[rank] = tuple(room.view(held, hosts.get(held, held)) for held in yours)
        lengths[rank] = {buffer: room.end}
    return (
        Holdings(first.params, first.dtype, ones, {rank: lengths[rank] for rank in first.ranks}),
        Holdings(second.params, second.dtype, others, {rank: lengths[rank] for rank in second.ranks}),
    )


class _Room:
    """One buffer that fills with blocks."""

    def __init__(self, buffer: str) -> None:
        self.buffer = buffer
        self.end = 0
        self.places: dict[Holding, Holding] = {}

    def settle(self, held: Holding) -> None:
        strides = dense_strides(held.box)
        self.places[held] = held._replace(buffer=self.buffer, offset=self.end, strides=strides)
        self.end += aligned(held.box.num_elements)

    def view(self, held: Holding, host: Holding) -> Holding:
        """`held` as a part of `host`, which has settled."""
        place = self.places[host]
        return held._replace(buffer=self.buffer, offset=place.first(held.box), strides=place.strides)


def _host(held: Holding, others: tuple[Holding, ...]) -> Holding | None:
    return next((other for other in others if other.param == held.param and other.box.holds(held.box)), None)

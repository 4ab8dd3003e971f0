"""Layouts of a model in one memory, as holdings."""

from __future__ import annotations

from collections.abc import Sequence

from plait.layout.holdings import Holdings
from plait.layout.nesting import AliasedPart, nest


def nested(parts: Sequence[Holdings]) -> tuple[Holdings, ...]:
    """The same holdings, nested on each rank where several have some; see `nest`.

    Args:
        parts: weights of layouts of one model in one dtype, each in a buffer of its own name.
    """
    first = parts[0]
    assert all(part.params == first.params for part in parts), "holdings of different parameters do not nest"
    assert all(part.dtype == first.dtype for part in parts), "holdings of different dtypes do not nest"
    nests_of_parts: list[dict[int, AliasedPart]] = [{} for _ in parts]
    for rank in sorted({rank for part in parts for rank in part.ranks}):
        mine = {name: (at, part.ranks[rank]) for at, part in enumerate(parts) for name in part.buffers.get(rank, ())}
        assert len(mine) == sum(rank in part.ranks for part in parts), f"rank {rank}: parts need a buffer each"
        nests = nest({name: held for name, (_, held) in mine.items()}, first.params)
        for name, (at, _) in mine.items():
            nests_of_parts[at][rank] = nests[name]
    return tuple(
        Holdings(
            first.params,
            first.dtype,
            {rank: nest_of_rank.held for rank, nest_of_rank in ranks.items()},
            {rank: nest_of_rank.lengths for rank, nest_of_rank in ranks.items()},
        )
        for ranks in nests_of_parts
    )


def num_bytes(rank: int, *parts: Holdings) -> int:
    """Bytes of all buffers that some of the parts lie in."""
    lengths = {name: size for part in parts for name, size in part.buffers.get(rank, {}).items()}
    return sum(lengths.values()) * parts[0].item_bytes

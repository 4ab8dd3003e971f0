"""Which rows each data-parallel rank computes in a call: those that it must be sent. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from plait.data.rows import Rows, sizes_of
from plait.policy.packing import draw_mini_batches
from plait.training.micro_batches import shares_over


def drawn_batches(
    rows: Rows, mini_batches: int, *, epochs: int, seed: int, step: int, whole_groups: bool
) -> Iterator[tuple[int, ...]]:
    """The mini-batches of all epochs in turn: positions in `rows`, which are ordered (`Rows.ordered`)."""
    ids = [(sample.prompt.uid, sample.index) for sample in rows.samples]
    for epoch in range(epochs):
        yield from draw_mini_batches(ids, mini_batches, seed=seed, step=step, epoch=epoch, whole_groups=whole_groups)


def shares_of(
    rows: Rows,
    batches: Iterable[Sequence[int]],
    ways: int,
    *,
    whole_groups: bool = False,
    pair_tokens: float = 0.0,
) -> tuple[tuple[int, ...], ...]:
    """The rows of each of `ways` ranks in any of these batches.

    Args:
        rows: ordered.
        batches: positions of the rows of each, which are divided by themselves.
        whole_groups, pair_tokens: as of `micro_batches.shares_over`.

    Returns:
        Positions, ascending. A row of several batches (epochs) may be several ranks'.
    """
    sizes = sizes_of(rows)
    of_ranks: list[set[int]] = [set() for _ in range(ways)]
    for members in batches:
        mine = [sizes[i] for i in members]
        shares = shares_over(mine, ways, whole_groups=whole_groups, pair_tokens=pair_tokens)
        for of_rank, share in zip(of_ranks, shares, strict=True):
            of_rank.update(members[i] for i in share)
    return tuple(tuple(sorted(mine)) for mine in of_ranks)

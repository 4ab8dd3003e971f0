"""The split of a mini-batch over data-parallel ranks, and of each rank's share into micro-batches; and which rows a
rank must be sent for a call. Imports no torch.

Like every split it changes the time, never the result. Ranks take about equal loads: packed tokens, or, where it is
said what a pair of a query and a key takes, about equal times, with the squares of the lengths in them. A group stays
on one rank while that keeps them balanced, and is cut, its prompt paid again, where it does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from plait.data.rows import Rows, sizes_of
from plait.policy.packing import MicroBatch, SampleSize, draw_mini_batches, split_micro_batches

PIECES_OF_A_SHARE = (1, 2, 4)
"""How finely groups are cut, if need be: into pieces of at most one share, a half, a quarter."""


def split_over(
    samples: Sequence[SampleSize],
    budget_tokens: int,
    *,
    ways: int = 1,
    least: int = 1,
    whole_groups: bool = False,
    pair_tokens: float = 0.0,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """The micro-batches of each of `ways` ranks, at most `budget_tokens` packed tokens each.

    Args:
        least: micro-batches wanted on each rank, about equal: so many keep a pipeline busy. Fewer where there are
            fewer samples.
        whole_groups: as of `split_micro_batches`, which gives the micro-batches of one rank that wants one.
        pair_tokens: what a pair of a query and a key takes, in tokens; 0: loads are tokens alone.

    Returns:
        Every sample in exactly one micro-batch of one rank; ranks without samples have none. A pure function of its
        arguments.
    """
    of_ranks = []
    for share in shares_over(samples, ways, whole_groups=whole_groups, pair_tokens=pair_tokens):
        members = [samples[i] for i in share]
        micros = split_micro_batches(members, budget_tokens, whole_groups=whole_groups)
        if len(micros) < least and len(members) > len(micros):
            micros = _at_least(members, least, budget_tokens, pair_tokens, whole_groups=whole_groups)
        of_ranks.append(tuple(_renumbered(micro, share) for micro in micros))
    return tuple(of_ranks)


def shares_over(
    samples: Sequence[SampleSize], ways: int, *, whole_groups: bool = False, pair_tokens: float = 0.0
) -> tuple[tuple[int, ...], ...]:
    """The samples of each of `ways` ranks, which `split_over` cuts into micro-batches: every sample on one rank."""
    if ways == 1:
        return (tuple(range(len(samples))),)
    shares = _balanced(samples, ways, pair_tokens, whole_groups=whole_groups)
    return (*shares, *[()] * (ways - len(shares)))


def _balanced(
    samples: Sequence[SampleSize], ways: int, pair_tokens: float, *, whole_groups: bool, in_turn: bool = False
) -> list[tuple[int, ...]]:
    """Samples of each of at most `ways` parts, by the cheapest of some ways to cut groups.

    Args:
        in_turn: parts pass a pipeline one after the other, which takes the sum of all and, to fill and drain it, the
            largest once more; else they are computed at the same time, which takes the largest.
    """
    total = sum(micro.num_tokens - micro.root_tokens for micro in _pieces(samples, None, whole_groups=whole_groups))
    caps = [None] if whole_groups else [None, *(max(1, -(-total // (ways * n))) for n in PIECES_OF_A_SHARE)]
    best: tuple[float, list[tuple[int, ...]]] | None = None
    for cap in caps:
        pieces = _pieces(samples, cap, whole_groups=whole_groups)
        parts = _spread(pieces, [_load(samples, piece, pair_tokens) for piece in pieces], ways)
        loads = [_load(samples, _micro_batch(samples, part), pair_tokens) for part in parts]
        cost = max(loads, default=0) + (sum(loads) if in_turn else 0)
        if best is None or cost < best[0]:
            best = cost, parts
    assert best is not None, "there is always the cut that cuts nothing"
    return best[1]


def _at_least(
    samples: Sequence[SampleSize], least: int, budget_tokens: int, pair_tokens: float, *, whole_groups: bool
) -> tuple[MicroBatch, ...]:
    """About equal micro-batches, `least` of them as far as groups allow it; more where one exceeds the budget."""
    parts = _balanced(samples, least, pair_tokens, whole_groups=whole_groups, in_turn=True)
    micros = [_micro_batch(samples, part) for part in parts]
    if any(micro.num_tokens > budget_tokens for micro in micros):
        micros = [
            _renumbered(micro, part)
            for part in parts
            for micro in split_micro_batches([samples[i] for i in part], budget_tokens, whole_groups=whole_groups)
        ]
    return tuple(sorted(micros, key=lambda micro: (-micro.num_tokens, micro.samples)))


def _pieces(samples: Sequence[SampleSize], cap: int | None, *, whole_groups: bool) -> list[MicroBatch]:
    """Groups in pieces of at most `cap` tokens behind the root; None: without a limit."""
    groups: dict[Hashable, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    pieces: list[MicroBatch] = []
    for members in groups.values():
        sizes = [samples[i] for i in members]
        most = sum(size.prompt_tokens + size.response_tokens for size in sizes)
        budget_tokens = sizes[0].root_tokens + max(1, most if cap is None else cap)
        cut = split_micro_batches(sizes, budget_tokens, whole_groups=whole_groups)
        pieces.extend(_renumbered(piece, members) for piece in cut)
    return pieces


def _spread(pieces: Sequence[MicroBatch], weights: Sequence[float], ways: int) -> list[tuple[int, ...]]:
    """Samples of each part: pieces from the heaviest on, each to the part that has least (LPT, Graham 1969)."""
    loads: list[float] = [0] * ways
    parts: list[list[int]] = [[] for _ in range(ways)]
    for weight, piece in sorted(zip(weights, pieces, strict=True), key=lambda pair: (-pair[0], pair[1].samples)):
        lightest = min(range(ways), key=lambda k: (loads[k], k))
        loads[lightest] += weight
        parts[lightest].extend(piece.samples)
    return [tuple(sorted(part)) for part in parts if part]


def _load(samples: Sequence[SampleSize], micro: MicroBatch, pair_tokens: float) -> float:
    """The work of a micro-batch in tokens, its root left out. It counts the tokens, and the pairs of tokens in
    attention at `pair_tokens` each: prompts attend to the root and themselves, responses to the root, their prompt and
    themselves."""
    tokens = micro.num_tokens - micro.root_tokens
    if pair_tokens == 0:
        return tokens
    pairs = tokens * micro.root_tokens
    for group in micro.groups:
        prompt = samples[group[0]].prompt_tokens
        pairs += prompt * (prompt + 1) // 2
        for response in (samples[i].response_tokens for i in group):
            pairs += response * prompt + response * (response + 1) // 2
    return tokens + pair_tokens * pairs


def _micro_batch(samples: Sequence[SampleSize], part: Sequence[int]) -> MicroBatch:
    """One micro-batch of these samples: the root and each group's prompt once."""
    groups: dict[Hashable, list[int]] = {}
    for i in part:
        groups.setdefault(samples[i].group, []).append(i)
    prompts = sum(samples[members[0]].prompt_tokens for members in groups.values())
    root = samples[part[0]].root_tokens
    tokens = root + prompts + sum(samples[i].response_tokens for i in part)
    return MicroBatch.of(tuple(tuple(members) for members in groups.values()), tokens, root)


def _renumbered(micro: MicroBatch, numbers: Sequence[int]) -> MicroBatch:
    return replace(micro, groups=tuple(tuple(numbers[i] for i in group) for group in micro.groups))


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

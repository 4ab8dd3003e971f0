"""Which samples of a rollout are scored together (a part), and from when on that is known.

What is packed together is computed together, and a rounding must not depend on the clock: parts follow from the samples
alone. Groups, the samples of a prompt, are put together in the order in which they would end if samples began in the
order in which they were asked for, as many at a time as instances run, and drew a token in each step. That is about the
order in which they do end. So most parts are known long before all samples have ended: a group that has not has said
more already, or begins too late, to come before them.

Where groups are parted, the last samples to end, so many of the rollout, are scored without the others of their
groups, which need not wait for them; which these are follows from the same order.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple


@dataclass(frozen=True)
class SampleLength:
    """tokens: of a sample; ended: it has no more, else it will have one more at least"""

    tokens: int
    ended: bool

    @property
    def least(self) -> int:
        return self.tokens if self.ended else self.tokens + 1


@dataclass(frozen=True)
class PartSize:
    """How large parts are.

    tokens: of prompts and responses, at most, unless a group alone has more; without what all prompts begin with, which
            each forward computes once
    rises:  the first part has a quarter of them, the second half: whoever leads begins with them while others generate,
            and cannot tell them what to score before it has ended
    falls:  None, or the number of copies that score parts: none has more than half of a copy's share of the groups that
            are left, so that the last are small, and copies end at about the same time
    """

    tokens: int
    rises: bool = False
    falls: int | None = None

    def most(self, left: int) -> int:
        """Groups of a part when so many are left."""
        return left if self.falls is None else -(-left // (2 * self.falls))

    def tokens_of(self, number: int) -> int:
        """The most tokens that the part of this number, from 0, may have."""
        return max(1, self.tokens >> max(0, 2 - number)) if self.rises else self.tokens


class ScoredPart(NamedTuple):
    """Samples of one group, which are scored together. indices: of all its samples, but where groups are parted"""

    place: int
    indices: tuple[int, ...]


class _End(NamedTuple):
    """When a sample ends at the earliest, and at the latest; by themselves they sort as samples end."""

    step: float
    place: int
    number: int
    latest: float

    @property
    def is_exact(self) -> bool:
        return self.step == self.latest


def settled(groups: Sequence[Sequence[SampleLength]], at_once: int, parted: int = 0) -> list[ScoredPart]:
    """Groups whose place in the order is known, first to last; all of them when all samples have ended.

    Args:
        groups: in the order in which they were asked for.
        at_once: samples that run at a time.
        parted: samples, the last of all, that are scored without the others of their groups. The others are pieces
            that come behind the groups without any of the last, in the order in which they were asked for; then come
            those, and groups that have no others.
    """
    samples = [(place, index, sample) for place, group in enumerate(groups) for index, sample in enumerate(group)]
    earliest = _ends([sample.least for _, _, sample in samples], at_once)
    latest = _ends([sample.tokens if sample.ended else inf for _, _, sample in samples], at_once)
    ends = [
        _End(first, place, index, last)
        for (place, index, _), first, last in zip(samples, earliest, latest, strict=True)
    ]
    if not parted:
        return _pieces(ends)
    ends.sort()
    early, late = ends[: -parted or None], ends[max(0, len(ends) - parted) :]
    if all(end.is_exact for end in early):
        split = {end.place for end in early} & {end.place for end in late}
        before = _pieces([end for end in early if end.place not in split])
        parts = sorted(_pieces([end for end in early if end.place in split]))
        return [*before, *parts, *_pieces(late)]
    # A group surely has none of the last, where so few samples may end before it does.
    return _pieces(ends, {end.place for end in late} | {end.place for end in early if not end.is_exact})


def _pieces(ends: Sequence[_End], others: Collection[int] = ()) -> list[ScoredPart]:
    """The samples that end so, by groups in the order of their last ones, as far as that is known.

    Args:
        others: groups that are not among them, nor what comes behind them.
    """
    indices: defaultdict[int, list[int]] = defaultdict(list)
    last: dict[int, tuple[float, float]] = {}
    for step, place, index, latest in ends:
        indices[place].append(index)
        first, until = last.get(place, (0.0, 0.0))
        last[place] = max(first, step), max(until, latest)
    known = sorted((first, place, first == until and place not in others) for place, (first, until) in last.items())
    count = next((count for count, (_, _, is_known) in enumerate(known) if not is_known), len(known))
    return [ScoredPart(place, tuple(sorted(indices[place]))) for _, place, _ in known[:count]]


def _ends(lengths: Sequence[float], at_once: int) -> Iterator[float]:
    """The step after which each sample ends, if it begins as a place is free: none sooner where a length is longer."""
    places = [0.0] * min(at_once, len(lengths))
    for length in lengths:
        end = places[0] + length
        heapq.heapreplace(places, end)
        yield end


def next_part(sizes: Sequence[int], left: int, size: PartSize, number: int) -> int | None:
    """Pieces of the next part: groups, or what is parted from them; None: it is not known yet.

    Args:
        sizes: tokens of the pieces that are settled and in no part yet, in their order.
        left: groups with samples that are in no part yet, settled or not.
        number: of the part, from 0.
    """
    tokens, most, limit = 0, size.most(left), size.tokens_of(number)
    for count, group in enumerate(sizes):
        if count and tokens + group > limit:
            return count
        tokens += group
        # Another one, of about as many tokens, would not fit: it need not be waited for.
        if count + 1 == most or tokens + group > limit:
            return count + 1
    return None

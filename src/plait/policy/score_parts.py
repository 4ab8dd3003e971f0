"""Which samples of a rollout are scored together (a part), and from when on that is known.

What is packed together is computed together, and a rounding must not depend on the clock: parts follow from the samples
alone. Groups, the samples of a prompt, are put together in the order in which they would end if samples began in the
order in which they were asked for, as many at a time as instances run, and drew a token in each step. That is about the
order in which they do end. So most parts are known long before all samples have ended: a group that has not has said
more already, or begins too late, to come before them.

Where groups are split, the last samples to end, so many of the rollout, are scored without the others of their
groups, which need not wait for them; which these are follows from the same order.

Shapes: N samples, X some of them, P their groups, G all groups.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class SampleLength(NamedTuple):
    """tokens: that a sample has so far; ended: whether these are all (if not, at least one more will come)"""

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
    """Samples of one group, which are scored together. indices: of all its samples, but where groups are split"""

    place: int
    indices: tuple[int, ...]


class _Ends(NamedTuple):
    """When samples end at the earliest, and at the latest, by the order in which they were asked for."""

    places_N: IntArray
    """Places of their groups."""
    numbers_N: IntArray
    """Their numbers in these groups."""
    earliest_N: FloatArray
    latest_N: FloatArray


def settled(groups: Sequence[Sequence[SampleLength]], at_once: int, num_split: int = 0) -> list[ScoredPart]:
    """Groups whose place in the order is known, first to last; all of them when all samples have ended.

    Args:
        groups: in the order in which they were asked for.
        at_once: samples that run at a time.
        num_split: samples, the last of all, that are scored without the others of their groups. The others are pieces
            that come behind the groups without any of the last, in the order in which they were asked for; then come
            those, and groups that have no others.
    """
    ends = _ends(groups, at_once)
    every_N = np.arange(len(ends.places_N))
    if not num_split:
        return _pieces(ends, every_N)
    order_N = np.lexsort((ends.numbers_N, ends.places_N, ends.earliest_N))
    early_X, late_X = order_N[:-num_split], order_N[max(0, len(order_N) - num_split) :]
    vague_X = early_X[ends.earliest_N[early_X] != ends.latest_N[early_X]]
    places_late = ends.places_N[late_X]
    if not len(vague_X):
        is_split_X = np.isin(ends.places_N[early_X], places_late)
        before = _pieces(ends, early_X[~is_split_X])
        parts = sorted(_pieces(ends, early_X[is_split_X]))
        return [*before, *parts, *_pieces(ends, late_X)]
    # A group surely has none of the last, where so few samples may end before it does.
    return _pieces(ends, every_N, np.concatenate([places_late, ends.places_N[vague_X]]))


def _pieces(ends: _Ends, samples_X: IntArray, others: Sequence[int] | IntArray = ()) -> list[ScoredPart]:
    """These samples, by groups in the order of their last ones, as far as that is known.

    Args:
        others: groups that are not among them, nor what comes behind them.
    """
    samples_X = np.sort(samples_X)  # by groups, and in each by number
    places_X, numbers = ends.places_N[samples_X], ends.numbers_N[samples_X].tolist()
    places_P, starts_P = np.unique(places_X, return_index=True)
    if not len(places_P):
        return []
    first_P = np.maximum.reduceat(ends.earliest_N[samples_X], starts_P)
    until_P = np.maximum.reduceat(ends.latest_N[samples_X], starts_P)
    order_P = np.argsort(first_P, kind="stable")
    is_vague_P = ((first_P != until_P) | np.isin(places_P, others))[order_P]
    count = int(is_vague_P.argmax()) if is_vague_P.any() else len(order_P)
    bounds = [*starts_P.tolist(), len(numbers)]
    return [ScoredPart(int(places_P[p]), tuple(numbers[bounds[p] : bounds[p + 1]])) for p in order_P[:count].tolist()]


def _ends(groups: Sequence[Sequence[SampleLength]], at_once: int) -> _Ends:
    """If each sample begins as a place is free."""
    samples = list(chain.from_iterable(groups))
    counts_G = np.array([len(group) for group in groups], np.int64)
    places_N = np.repeat(np.arange(len(groups)), counts_G)
    numbers_N = np.arange(len(samples)) - np.repeat(counts_G.cumsum() - counts_G, counts_G)
    earliest_N = _by_turns([sample.least for sample in samples], at_once)
    latest_N = _by_turns([sample.tokens if sample.ended else inf for sample in samples], at_once)
    return _Ends(places_N, numbers_N, earliest_N, latest_N)


def _by_turns(lengths: Sequence[float], at_once: int) -> FloatArray:
    """[N]: the step after which each sample ends: none sooner where a length is longer."""
    ends = list(map(float, lengths))
    if at_once < len(ends):
        places = sorted(ends[:at_once])
        for number in range(at_once, len(ends)):
            ends[number] += places[0]
            heapq.heapreplace(places, ends[number])
    return np.array(ends)


def next_part(sizes: Sequence[int], left: int, size: PartSize, number: int) -> int | None:
    """Pieces of the next part: groups, or what is split off them; None: it is not known yet.

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

"""Which samples of a rollout are scored together (a part), and from when on that is known.

What is packed together is computed together, and a rounding must not depend on the clock: parts follow from the samples
alone. Groups, the samples of a prompt, are put together in the order in which they would end if samples began in the
order in which they were asked for, as many at a time as instances run, and drew a token in each step. That is about the
order in which they do end. So most parts are known long before all samples have ended: a group that has not has said
more already, or begins too late, to come before them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf


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

    tokens: of prompts and responses, at most, unless a group alone has more
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


def settled(groups: Sequence[Sequence[SampleLength]], at_once: int) -> list[int]:
    """Groups whose place in the order is known, first to last; all of them when all samples have ended.

    Args:
        groups: in the order in which they were asked for.
        at_once: samples that run at a time.
    """
    samples = [sample for group in groups for sample in group]
    earliest = iter(_ends([sample.least for sample in samples], at_once))
    latest = iter(_ends([sample.tokens if sample.ended else inf for sample in samples], at_once))
    known = []
    for place, group in enumerate(groups):
        first, last = (max(next(ends) for _ in group) for ends in (earliest, latest))
        known.append((first, place, first == last))
    known.sort()
    count = next((count for count, (_, _, exact) in enumerate(known) if not exact), len(known))
    return [place for _, place, _ in known[:count]]


def _ends(lengths: Sequence[float], at_once: int) -> Iterator[float]:
    """The step after which each sample ends, if it begins as a place is free: none sooner where a length is longer."""
    places = [0.0] * min(at_once, len(lengths))
    for length in lengths:
        end = places[0] + length
        heapq.heapreplace(places, end)
        yield end


def next_part(sizes: Sequence[int], left: int, size: PartSize, number: int) -> int | None:
    """Groups of the next part; None: it is not known yet.

    Args:
        sizes: tokens of the groups that are settled and in no part yet, in their order.
        left: groups that are in no part yet, settled or not.
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

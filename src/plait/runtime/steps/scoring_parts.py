"""Scoring that begins before all samples are there: in parts, each as soon as all its samples have ended.

Which samples make a part depends on the samples, never on the clock (`policy.score_parts`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.data.records import Sample
from plait.data.rows import FloatArray, Rows
from plait.engines import ScoredBy
from plait.policy.score_parts import PartSize, ScoredPart, next_part, settled
from plait.runtime.steps.partial_rollout import PartialRollout
from plait.schedule.work import MOVED_ON, Work

Scored = tuple[Rows, FloatArray]
"""Rows, and their scores: [samples] or [response tokens], float64."""


Call = Callable[[Rows, str, ScoredBy | None], Work[FloatArray]]
"""Scores a part: its rows, its name (`ref.logprobs/p1`), and the copy of the model that computes it; None: all copies
do, each a share."""

Spread = Callable[[Call, str], Work[list[Scored]]]
"""Scores all parts with a call of this name; the parts in their order."""

FEW_NEWS = 1 / 32
"""The next parts are looked for again when there is so much news for each unfinished sample: a look takes as long as
the rollout is large, and hardly anything is settled between two ends of many."""


@dataclass(frozen=True)
class Part:
    """What is scored together."""

    name: str
    """Follows the name of the call in the names of its actions."""
    rows: Rows
    share: float = 1.0
    """Tokens of the part, as a share of those that a full part has."""


class Parts(Protocol):
    """The rows that a call scores, a part at a time."""

    @property
    def left(self) -> int:
        """Groups of which some samples are in no part that was taken."""
        ...

    def take(self) -> Part | None:
        """The next part; None: it is not known yet, or there is none."""
        ...


class Table:
    """One part, which has all rows of a table."""

    def __init__(self, rows: Callable[[], Rows]) -> None:
        self._rows = rows
        self.left = 1

    def take(self) -> Part | None:
        """See `Parts`."""
        if not self.left:
            return None
        self.left = 0
        return Part("", self._rows())


class RolloutParts:
    """Parts of a rollout as its groups end.

    Args:
        size: how large a part may be.
        at_once: how many samples run at a time.
        num_split: how many samples, the last ones, are scored apart from the others of their groups.
    """

    def __init__(self, rollout: PartialRollout, size: PartSize, at_once: int, num_split: int = 0) -> None:
        self._rollout, self._size, self._at_once, self._num_split = rollout, size, at_once, num_split
        self._taken = self._number = 0
        self._open = dict.fromkeys(range(len(rollout.prompts)), rollout.count)
        """Group → how many of its samples are in no part that was taken."""
        self._order: list[ScoredPart] = []
        """The pieces whose place in the order of scoring is settled, in this order."""
        self._placed = 0
        """Samples in `_order`."""
        self._due = 0
        """`PartialRollout.news` at which `_order` is computed again."""

    @property
    def left(self) -> int:
        """See `Parts`."""
        return len(self._open)

    def take(self) -> Part | None:
        """See `Parts`."""
        rollout = self._rollout
        if rollout.news >= self._due and self._placed < rollout.num_finished:
            self._due = rollout.news + max(1, int(FEW_NEWS * (rollout.num_asked - rollout.num_finished)))
            lengths = [rollout.lengths_of(prompt.uid) for prompt in rollout.prompts]
            self._order = settled(lengths, self._at_once, self._num_split)
            self._placed = sum(len(piece.indices) for piece in self._order)
        pieces = [rollout.samples_of(piece) for piece in self._order[self._taken :]]
        sizes = [_tokens(samples) - rollout.root_tokens for samples in pieces]
        count = next_part(sizes, self.left, self._size, self._number)
        if count is None:
            return None
        name, rows = f"/p{self._number}", Rows(tuple(sample for piece in pieces[:count] for sample in piece)).ordered()
        for place, indices in self._order[self._taken : self._taken + count]:
            self._open[place] -= len(indices)
            if not self._open[place]:
                del self._open[place]
        self._taken, self._number = self._taken + count, self._number + 1
        return Part(name, rows, min(1.0, sum(sizes[:count]) / self._size.tokens))


def _tokens(samples: Sequence[Sample]) -> int:
    """Tokens of these samples of one prompt, the prompt included once."""
    return len(samples[0].prompt.token_ids) + sum(sample.num_tokens for sample in samples)


def in_parts(parts: Parts, call: Call, name: str) -> Work[list[Scored]]:
    """Score each part as soon as it is there, with all copies of the model. Several parts may be under way; they end in
    their order."""
    going = deque[tuple[Rows, Work[FloatArray]]]()
    scored: list[Scored] = []
    while parts.left or going:
        done = None
        while (part := parts.take()) is not None:
            going.append((part.rows, call(part.rows, name + part.name, None)))
            done = next(going[-1][1])
        if done is None and going:
            rows, work = going[0]
            try:
                done = next(work)
            except StopIteration as end:
                going.popleft()
                scored.append((rows, end.value))
                done = MOVED_ON
        yield done
    return scored

"""Scoring by copies of a model whose ranks have nothing left to generate, or never generate: which copy scores which
part, and when it is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.data.rows import FloatArray
from plait.engines import ScoredBy
from plait.runtime.steps.scoring_parts import Call, Part, Parts, Scored
from plait.schedule.dispatch import Key as CallKey
from plait.schedule.dispatch import Task
from plait.schedule.work import MOVED_ON, Done, Work
from plait.workers.ranks import LEADER

TOLD = 1.0
"""A copy without the leader is told of one more part while it has at most this many full parts to do, of all calls: so
it has enough to do while the leader computes a full part."""
MOST_TOLD = 4
"""Parts of one call that a copy is told of ahead, at most."""


@dataclass(frozen=True)
class Copies:
    """Copies of a model that score, each by itself.

    ranks:  of each copy
    behind: the call whose samples they score; a copy that only generates for it may be told of a part ahead
    keeps:  no copy is told ahead of the last groups, this many, which go to the first copy that is free
    alone:  one copy scores each part; else `ranks` has one entry, the ranks of all copies, which divide each part
    """

    ranks: Sequence[frozenset[int]]
    behind: CallKey
    keeps: int = 0
    alone: bool = True


class _WhereFree:
    """The state of one `where_free`."""

    def __init__(self, parts: Parts, copies: Copies, task: Task, call: Call, name: str) -> None:
        self._parts, self._copies, self._task, self._call, self._name = parts, copies, task, call, name
        self._going: list[deque[tuple[int, Part, Work[FloatArray]]]] = [deque() for _ in copies.ranks]
        self._order = sorted(range(len(copies.ranks)), key=self._leads)
        """Places of the copies; that with the leader comes last."""
        self._part: Part | None = None
        """The part that was taken and not given to a copy yet."""
        self._given = 0
        self.scored: dict[int, Scored] = {}

    def _leads(self, place: int) -> bool:
        return LEADER in self._copies.ranks[place]

    @property
    def is_left(self) -> bool:
        """Whether a part is still to be scored, or is being scored."""
        return self._part is not None or bool(self._parts.left) or any(self._going)

    def give(self) -> Iterator[Done]:
        """Give the parts that are there to copies; an action for each copy without the leader that was told of one."""
        for had in range(MOST_TOLD):
            for place in self._order:
                if len(self._going[place]) == had and self._has_one_for(place, had):
                    if self._task.take(self._copies.ranks[place]):
                        yield from self._give(place)
                    elif not had and self._may_follow(place):
                        yield from self._give(place, is_behind=True)
        if self._part is None and not self._parts.left:
            self._task.share([rank for ranks in self._copies.ranks if LEADER not in ranks for rank in ranks])

    def _has_one_for(self, place: int, had: int) -> bool:
        """Whether there is a part for a copy that has `had` parts of this call. If so, `_part` is that part."""
        ranks, leads, task = self._copies.ranks[place], self._leads(place), self._task
        is_scarce = self._part is None and self._parts.left <= self._copies.keeps
        if task.waits_for(ranks) > (0.0 if leads else TOLD) or (had and (leads or is_scarce)):
            return False
        self._part = self._part or self._parts.take()
        return self._part is not None

    def _may_follow(self, place: int) -> bool:
        """Whether a copy that still generates is told of a part that it is to score after that: if the leader computes
        one, which may take longer than the copy's last samples, and if much is left. A copy of several ranks is not
        told: its ranks would have to agree on what comes before the part."""
        ranks = self._copies.ranks[place]
        is_busy = any(self._going[other] for other in self._order if self._leads(other))
        is_much_left = self._parts.left > 2 * len(self._order)
        if self._leads(place) or len(ranks) > 1 or not is_busy or not is_much_left or self._task.waits_for(ranks):
            return False
        return self._task.follows(self._copies.behind, ranks)

    def _give(self, place: int, *, is_behind: bool = False) -> Iterator[Done]:
        assert self._part is not None, "it was taken"
        part, self._part = self._part, None
        work = self._call(part.rows, self._name + part.name, ScoredBy(place, is_behind) if self._copies.alone else None)
        self._going[place].append((self._given, part, work))
        self._task.tell(self._copies.ranks[place], part.share)
        self._given += 1
        if not self._leads(place):
            yield next(work) or MOVED_ON

    def go_on(self, *, leader: bool) -> Iterator[Done]:
        """Do an action of each copy that can go on.

        Args:
            leader: whether the leader's own copy computes, too.
        """
        for place in self._order:
            queue = self._going[place]
            if not queue or (self._leads(place) and not leader):
                continue
            number, part, work = queue[0]
            try:
                done = next(work)
            except StopIteration as end:
                queue.popleft()
                self.scored[number] = part.rows, end.value
                self._task.tell(self._copies.ranks[place], -part.share)
                if not queue:
                    self._task.release(self._copies.ranks[place])
                done = MOVED_ON
            if done is not None:
                yield done


def where_free(parts: Parts, copies: Copies, task: Task, call: Call, name: str) -> Work[list[Scored]]:
    """Score each part with one copy of the model (or with all together, see `Copies.alone`) as soon as no other call
    keeps that copy's ranks busy. While there is nothing to score, the call keeps no ranks.

    The clock decides which copy scores a part, and when; it does not decide what is scored together. Copies without
    the leader are told of parts ahead (TOLD), because the leader may be in the middle of an action when they end a
    part. For the same reason they are told of one part while they still generate, and their ranks are shared with
    other calls as soon as all parts are given out, before the leader computes its own part.

    Args:
        task: of this call; its mesh has the ranks of the copies that score.
    """
    scoring = _WhereFree(parts, copies, task, call, name)
    while scoring.is_left:
        moved = False
        for done in scoring.give():
            moved = True
            yield done
        # If a copy was told of a part, other calls may tell theirs before the leader computes.
        for done in scoring.go_on(leader=not moved):
            moved = True
            yield done
        yield MOVED_ON if moved else None
    return [scoring.scored[number] for number in sorted(scoring.scored)]

"""Scoring by copies of a model whose ranks have nothing left to generate, or never generate: who is told of which part,
and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plait.data.rows import FloatArray
from plait.engines import ScoredBy
from plait.runtime.steps.streams import Call, Part, Parts, Scored
from plait.schedule.dispatch import Key as CallKey
from plait.schedule.dispatch import Task
from plait.schedule.work import MOVED_ON, Done, Work
from plait.workers.ranks import LEADER

TOLD = 1.0
"""Full parts, of all calls, up to which a copy without the leader is told of one more: so it has enough to do while the
leader computes a full one."""
MOST_TOLD = 4
"""Parts of a call that it is told of at most."""


@dataclass(frozen=True)
class Copies:
    """Copies of a model that score, each by itself.

    ranks:  of each
    behind: the call whose samples they score; who is busy with nothing else may be told what comes behind it
    keeps:  groups that are left for whoever is free first, and of which nobody is told ahead
    alone:  each part is scored by one of them; else `ranks` has one entry, those of all copies, which divide each part
    """

    ranks: Sequence[frozenset[int]]
    behind: CallKey
    keeps: int = 0
    alone: bool = True


class _WhereFree:
    """See `where_free`. One object for each call."""

    def __init__(self, parts: Parts, copies: Copies, task: Task, call: Call, name: str) -> None:
        self._parts, self._copies, self._task, self._call, self._name = parts, copies, task, call, name
        self._going: list[deque[tuple[int, Part, Work[FloatArray]]]] = [deque() for _ in copies.ranks]
        self._order = sorted(range(len(copies.ranks)), key=self._leads)
        """Copies, that with the leader last."""
        self._part: Part | None = None
        """That was taken and not given out."""
        self._given = 0
        self.scored: dict[int, Scored] = {}

    def _leads(self, place: int) -> bool:
        return LEADER in self._copies.ranks[place]

    @property
    def is_left(self) -> bool:
        """Whether there is something to score, or it is on its way."""
        return self._part is not None or bool(self._parts.left) or any(self._going)

    def give(self) -> Iterator[Done]:
        """Give out what is there; what the copies without the leader say when they are told."""
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
        """Whether there is a part for a copy that is at so many of this call; it is taken then, whoever gets it."""
        ranks, leads, task = self._copies.ranks[place], self._leads(place), self._task
        is_scarce = self._part is None and self._parts.left <= self._copies.keeps
        if task.waits_for(ranks) > (0.0 if leads else TOLD) or (had and (leads or is_scarce)):
            return False
        self._part = self._part or self._parts.take()
        return self._part is not None

    def _may_follow(self, place: int) -> bool:
        """Whether a copy that still generates is told of a part behind that: the leader is at one, which may take
        longer than the other's last samples, and more is left than both would begin with at once. Several ranks would
        have to agree on what comes before it."""
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
        """An action of each copy, or word of it, if there is one.

        Args:
            leader: its own copy computes, too.
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
    """As `in_parts`, each part by one copy of the model, as soon as nobody else keeps the ranks of one busy; or by all
    of them together. While nothing is there to be scored, no rank is kept.

    Which copy scores a part, and when, is the clock's to say; what is scored together is not. Copies without the leader
    are told ahead (TOLD): the leader may be in the middle of an action when they have ended what they are at. For the
    same reason they are told of one part behind the samples that they still generate, and let go when all parts are
    given out, not when they have ended theirs, and before the leader computes its own: they are told of another call's
    part behind it.

    Args:
        task: of this call; it keeps busy the ranks of the copies that are at work.
    """
    scoring = _WhereFree(parts, copies, task, call, name)
    while scoring.is_left:
        moved = False
        for done in scoring.give():
            moved = True
            yield done
        # Where somebody was told of a part, another call may have one for others before the leader computes.
        for done in scoring.go_on(leader=not moved):
            moved = True
            yield done
        yield MOVED_ON if moved else None
    return [scoring.scored[number] for number in sorted(scoring.scored)]

"""Simulated seconds: the clock with which `schedule.dispatch` drives a prediction as it drives a run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

from plait.schedule.dispatch import Task
from plait.schedule.timeline import Span
from plait.schedule.work import Done, Work

Said = TypeVar("Said")


class SimulatedClock:
    """`schedule.dispatch.Clock` of a prediction. Works say how long their actions take (`take`, `begin`, `spend`); time
    passes only where none of them can go on, from the end of one action to the end of the next.

    Ends at the same moment come in the order in which their actions began, each by itself: what can go on after the
    first goes on before the second has come.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.spans: list[Span] = []
        """A span for every action that has begun, but for what was only spent."""
        self._ends: list[tuple[float, int, Callable[[], object]]] = []
        self._begun = 0

    def advance(self, task: Task) -> Done | None:
        """The record of an action comes when that begins: its end is known."""
        return next(task.work)

    def wait(self, tasks: Sequence[Task]) -> None:
        """On to the next end of an action."""
        assert self._ends, f"nobody would ever go on with {[task.name for task in tasks]}"
        self.now_s, _, deliver = heapq.heappop(self._ends)
        deliver()

    def begin(
        self, done: Done, rank: int, role: str, seconds: float, deliver: Callable[[], object], *, after_s: float = 0.0
    ) -> float:
        """An action that nobody waits with; once it has ended, what it `deliver`s is there for all works.

        Args:
            after_s: it begins then, or now if that is later.

        Returns:
            When it ends.
        """
        start = max(self.now_s, after_s)
        end = start + seconds
        self.spans.append(Span.of(done, rank, start, end, role))
        self._end_at(end, deliver)
        return end

    def elapse(self, seconds: float) -> None:
        """So much time, in which nothing goes on."""
        assert not self._ends, "an action has begun, and has not ended"
        self.now_s += seconds

    def _end_at(self, end_s: float, deliver: Callable[[], object]) -> None:
        self._begun += 1
        heapq.heappush(self._ends, (end_s, self._begun, deliver))

    def spend(self, done: Done, seconds: float) -> Work[None]:
        """An action to its end, from this call on, of which its work keeps a record of its own."""
        ended: list[None] = []
        self._end_at(self.now_s + seconds, lambda: ended.append(None))
        return _until(ended, done)

    def take(self, done: Done, rank: int, role: str, seconds: float, deliver: Callable[[], Said]) -> Work[Said]:
        """An action to its end, from this call on; what `deliver` says then."""
        answers: list[Said] = []
        self.begin(done, rank, role, seconds, lambda: answers.append(deliver()))
        return _until(answers, done)


def _until(answers: Sequence[Said], done: Done) -> Work[Said]:
    """The record of an action that has begun, and the first answer once it is there."""
    yield done
    while not answers:
        yield None
    return answers[0]

"""What ran, when: the measured timeline of a run. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from plait.schedule.timeline import Span, Timeline
from plait.schedule.work import Done, Result, Work


class Recorder:
    """Collects the spans of one rank, one training step at a time.

    Seconds run from the start of the recorder; `offset_s` continues the clock of an interrupted run.
    """

    def __init__(self, rank: int = 0, offset_s: float = 0.0) -> None:
        self.rank = rank
        self._zero = time.perf_counter() - offset_s
        self._spans: list[Span] = []
        self.step: int | None = None

    @classmethod
    def on_shared_clock(cls, rank: int) -> Recorder:
        """On the clock that all processes of a machine share: `zero_s` is 0."""
        recorder = cls(rank)
        recorder._zero = 0.0
        return recorder

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._zero

    @property
    def zero_s(self) -> float:
        """When this clock was 0, on the clock that all processes of a machine share."""
        return self._zero

    def advance(self, work: Work[object], role: str = "") -> Done | None:
        """Do one action of a work, and record it. Raises StopIteration at its end, and what the work raises."""
        start_s = self.now_s
        done = next(work)
        if done is not None and done.action:
            self._ended(done, role, start_s)
        return done

    def drain(self, work: Work[Result], role: str = "") -> Result:
        """Do and record all of a work that waits for nobody; its result."""
        while True:
            try:
                done = self.advance(work, role)
            except StopIteration as end:
                return end.value
            assert done is not None, "a work that waits for others is waited with"

    def as_of(self, step: int, work: Work[Result]) -> Work[Result]:
        """The same work, recorded as of a step (from 1), whatever is done of others between its actions."""
        while True:
            self.step = step
            try:
                done = next(work)
            except StopIteration as end:
                return end.value
            yield done

    @contextmanager
    def span(self, action: str, kind: str) -> Iterator[None]:
        """Record what happens inside as one computation; nothing if it fails."""
        start_s = self.now_s
        yield
        self._ended(Done(action, kind), "", start_s)

    def add(self, action: str, kind: str, role: str, lane: str, start_s: float, end_s: float) -> None:
        """Record an action of another process; its times are those of the clock that all of a machine share."""
        start_s, end_s = start_s - self._zero, end_s - self._zero
        self._spans.append(Span(action, kind, self.rank, start_s, end_s, lane=lane, role=role, step=self.step))

    def _ended(self, done: Done, role: str, start_s: float) -> None:
        """An action of this process that began at `start_s`, on this clock, and ends now."""
        self._spans.append(Span.of(done, self.rank, start_s, self.now_s, role, self.step))

    def extend(self, spans: Iterable[Span]) -> None:
        """Add what other ranks recorded, on this clock."""
        self._spans += spans

    @contextmanager
    def of_no_step(self) -> Iterator[None]:
        """What is done inside, here and by those that are told to, is recorded as of no step."""
        step, self.step = self.step, None
        try:
            yield
        finally:
            self.step = step

    def peek(self) -> Timeline:
        """The spans of steps since the last `take`; without what belongs to none, such as an evaluation."""
        return Timeline(tuple(span for span in self._spans if span.step is not None), source="measured")

    def take(self) -> Timeline:
        """The spans since the last `take`; they are kept no longer."""
        spans, self._spans = tuple(self._spans), []
        return Timeline(spans, source="measured")

"""What ran, when: the measured timeline of a run. Torch-free."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.dataflow import Node
from plait.observe.progress import Progress
from plait.schedule.action import Kind
from plait.schedule.timeline import Span, Timeline
from plait.training.results import Done

if TYPE_CHECKING:
    from plait.runtime.ranks.crew_engine import CrewEngine
    from plait.runtime.ranks.member import Member

_PIPELINE = frozenset(kind.value for kind in Kind)

DISK = "disk"
"""Lane of what is written to checkpoints and read from them."""


@dataclass
class Mark:
    """Filled in while a span is open, when only the work itself tells what it was."""

    kind: str
    action: str
    tokens: int = 0
    lane: str = "compute"
    bytes: int = 0
    keep: bool = True

    def is_of(self, done: Done) -> None:
        """What a training engine says that it was."""
        self.action, self.kind, self.tokens, self.bytes = done.action, done.kind, done.tokens, done.bytes
        if done.kind in _PIPELINE:
            self.lane = Kind(done.kind).lane


@dataclass(frozen=True)
class Elsewhere:
    """Actions of a call that ran on other ranks only, which record them themselves."""

    count: int


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

    @contextmanager
    def span(self, action: str, kind: str, role: str = "", lane: str = "compute", tokens: int = 0) -> Iterator[Mark]:
        """Record what happens inside as one action; the mark yielded may still change its name, kind and tokens."""
        mark = Mark(kind, action, tokens, lane)
        start = self.now_s
        yield mark
        if mark.keep:
            span = Span(
                mark.action,
                mark.kind,
                self.rank,
                start,
                self.now_s,
                bytes=mark.bytes,
                tokens=mark.tokens,
                lane=mark.lane,
                role=role,
                step=self.step,
            )
            self._spans.append(span)

    def actions(
        self, work: Iterator[Any], node: Node, progress: Progress, ready: Callable[[], bool] = lambda: True
    ) -> Generator[bool, None, Any]:
        """Run a steppable call of a flow, one recorded action per `next()`; its result is that of the call.

        Args:
            ready: whether the next action need not be waited for; else False is yielded, and nothing done.
        """
        while True:
            while not ready():
                yield False
            with self.span(node.call, node.kind.upper(), node.role or "") as mark:
                try:
                    done = next(work)
                except StopIteration as stop:
                    mark.keep = False
                    return stop.value
                mark.keep = not isinstance(done, Elsewhere)
                if mark.keep:
                    mark.is_of(done)
            progress.advance(1 if mark.keep else done.count)
            yield True

    def add(self, action: str, kind: str, role: str, lane: str, start_s: float, end_s: float) -> None:
        """Record an action of another process; its times are those of the clock that all of a machine share."""
        start_s, end_s = start_s - self._zero, end_s - self._zero
        self._spans.append(Span(action, kind, self.rank, start_s, end_s, lane=lane, role=role, step=self.step))

    @contextmanager
    def generating(self, call: str, role: str, engine: CrewEngine | Member) -> Iterator[None]:
        """Record a step of an engine that is taken inside; nothing where only other ranks worked."""
        before = engine.received_bytes
        with self.span(call, "GENERATE", role) as mark:
            yield
            step = engine.last_step
            mark.keep = step is not None
            if step is not None:
                mark.kind, mark.tokens = step.kind.name, step.num_tokens
                mark.action = f"{call}/{step.kind.name.lower()}"
                mark.bytes = engine.received_bytes - before

    def extend(self, spans: Iterable[Span]) -> None:
        """Add what other ranks recorded, on this clock."""
        self._spans += spans

    def peek(self) -> Timeline:
        """The spans since the last `take`."""
        return Timeline(tuple(self._spans), source="measured")

    def take(self) -> Timeline:
        """The spans since the last `take`; they are kept no longer."""
        spans, self._spans = tuple(self._spans), []
        return Timeline(spans, source="measured")


def seconds_by_call(timeline: Timeline) -> dict[str, float]:
    """Busy seconds per call of the flow: `actor.generate/decode` counts for `actor.generate`. Of several ranks, those
    of the busiest. Checkpoints are no call (`DISK`)."""
    totals: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in timeline.spans:
        if span.lane == DISK:
            continue
        # A computation is one action, whose name may have a slash of its own (`critic/returns/mean`).
        call = span.action if span.kind == "COMPUTE" else span.action.split("/", 1)[0]
        totals[call][span.rank] += span.duration_s
    return {call: max(of_ranks.values()) for call, of_ranks in totals.items()}

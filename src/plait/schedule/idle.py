"""Where ranks did nothing, and what let them go on, as a timeline tells it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from plait.schedule.timeline import Span, Timeline
from plait.schedule.work import DISK

JUST_BEFORE = 0.25
"""Share of a wait."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank did nothing, on no lane, and then went on.

    until: what ended last on another rank, just before this one went on: that happens when another tells it something.
           None: nothing ended there in the last part of the wait (`JUST_BEFORE`).
    """

    rank: int
    start_s: float
    end_s: float
    until: Span | None = None

    def __str__(self) -> str:
        seconds = f"waits {self.start_s:g} to {self.end_s:g}"
        return seconds if self.until is None else f"{seconds} for rank {self.until.rank}: {self.until.action}"


def waits(timeline: Timeline, least_s: float = 0.0) -> list[Wait]:
    """Times of more than `least_s` in which a rank did nothing, from the start of the timeline to its last action, by
    rank and time. What is written to a disk counts as nothing: it waits for nobody."""
    spans = [span for span in timeline.spans if span.lane != DISK]
    begin_s = min((span.start_s for span in spans), default=0.0)
    waits = []
    for rank in timeline.ranks:
        others = [span for span in spans if span.rank != rank]
        others.sort(key=lambda span: (span.end_s, -abs(span.rank - rank)))  # of those that end together, a neighbour's
        ends = [span.end_s for span in others]
        for start, end in _gaps([span for span in spans if span.rank == rank], begin_s):
            if end - start > least_s:
                last = bisect_right(ends, end) - 1
                is_near = last >= 0 and end - ends[last] <= JUST_BEFORE * (end - start)
                waits.append(Wait(rank, start, end, others[last] if is_near else None))
    return waits


def waited_s(timeline: Timeline) -> dict[int, Counter[tuple[int, str] | None]]:
    """Seconds that each rank waited, by (rank, call) that let it go on, or the kind of an action that belongs to no
    call; None: nothing that the timeline has. A rank that never waited is not there."""
    seconds: dict[int, Counter[tuple[int, str] | None]] = {}
    for wait in waits(timeline):
        cause = None if wait.until is None else (wait.until.rank, _call_of(wait.until))
        seconds.setdefault(wait.rank, Counter())[cause] += wait.end_s - wait.start_s  # pyright: ignore[reportArgumentType]
    return seconds


def _call_of(span: Span) -> str:
    """`actor.generate` of `actor.generate/p0/mb1`; `actor F` of `actor:2F0`."""
    call = span.whole
    return call if "." in call and ":" not in call else f"{span.role} {span.kind}".strip()


def _gaps(spans: list[Span], begin_s: float) -> Iterator[tuple[float, float]]:
    busy_until = begin_s
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.start_s > busy_until:
            yield busy_until, span.start_s
        busy_until = max(busy_until, span.end_s)

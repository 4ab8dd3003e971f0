"""Where ranks did nothing, and what let them go on, as a timeline tells it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
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
    until: Span | None

    def __str__(self) -> str:
        seconds = f"waits {self.start_s:g} to {self.end_s:g}"
        return seconds if self.until is None else f"{seconds} for rank {self.until.rank}: {self.until.action}"


def waits(timeline: Timeline, least_s: float = 0.0) -> list[Wait]:
    """Times of more than `least_s` in which a rank did nothing, from the start of the timeline to its last action, by
    rank and time. What is written to a disk counts as nothing: it waits for nobody."""
    spans = [span for span in timeline.spans if span.lane != DISK]
    begin_s = min((span.start_s for span in spans), default=0.0)
    by_rank: dict[int, list[Span]] = {}
    for span in spans:
        by_rank.setdefault(span.rank, []).append(span)
    ended = sorted(spans, key=lambda span: span.end_s)
    ends = [span.end_s for span in ended]
    waits = []
    for rank, mine in sorted(by_rank.items()):
        for start, end in _gaps(mine, begin_s):
            if end - start > least_s:
                waits.append(Wait(rank, start, end, _until(ended, bisect_right(ends, end), (rank, start, end))))
    return waits


def _until(ended: Sequence[Span], behind: int, gap: tuple[int, float, float]) -> Span | None:
    """What ended last on another rank, just before a gap ends; of what ended together, that of the nearest rank.

    Args:
        ended: by their ends.
        behind: the place of the first that ended after the gap.
        gap: its rank, start and end.
    """
    rank, start_s, end_s = gap
    last: Span | None = None
    for place in range(behind - 1, -1, -1):
        span = ended[place]
        if end_s - span.end_s > JUST_BEFORE * (end_s - start_s) or (last is not None and span.end_s < last.end_s):
            break
        if span.rank != rank and (last is None or abs(span.rank - rank) < abs(last.rank - rank)):
            last = span
    return last


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

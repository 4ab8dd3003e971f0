"""Runs a schedule with a virtual clock: fixed lists of actions, several lanes per rank, a memory ledger.

An action starts when the action before it in its lane has ended, and all actions that it waits for have ended, plus the
latency between the two ranks. Receives are posted ahead, so they need not keep the order of their lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plait.errors import DataError
from plait.schedule.action import Action
from plait.schedule.schedule import Schedule
from plait.schedule.timeline import MemoryPoint, Span, Timeline
from plait.schedule.validate import validate

Seconds = Mapping[str, float] | Callable[[Action], float]
"""Duration of an action: by its id, or from the action itself."""
Latency = Callable[[Action, Action], float]
"""Seconds that must pass between the end of the first action and the start of the second, which waits for it."""


def simulate(
    schedule: Schedule,
    seconds: Seconds,
    *,
    holds: Mapping[str, float] | None = None,
    caps: Sequence[float] | None = None,
    latency_s: Latency | None = None,
) -> Timeline:
    """Run a schedule; return its predicted timeline.

    seconds: duration of each action; an id that a mapping does not name takes no time
    holds:   action id → memory that it takes (above zero, at its start) or gives back (below zero, at its end)
    caps:    [num_ranks] the most that each rank may hold
    latency_s: between ranks, besides what sends take

    Raises `DataError` when actions wait for each other, or a rank holds more than its cap.
    """
    actions = tuple(schedule)
    read = seconds if callable(seconds) else lambda action: seconds.get(action.id, 0.0)
    duration = [float(read(action)) for action in actions]
    start = _starts_s(actions, duration, latency_s)
    if start is None:
        validate(schedule)
        raise AssertionError("a schedule that passes validation deadlocked")
    spans = tuple(
        Span(a.id, a.kind.value, a.rank, t, t + d, a.bytes, 0, a.kind.lane, a.model)
        for a, t, d in zip(actions, start, duration, strict=True)
    )
    memory = () if holds is None else _ledger(spans, holds, caps)
    return Timeline(spans, memory).ordered()


def _starts_s(actions: Sequence[Action], duration: Sequence[float], latency_s: Latency | None) -> list[float] | None:
    """[n] start of every action, as early as all that it waits for allow; None where not all can start.

    duration: [n]
    """
    number = {action.id: k for k, action in enumerate(actions)}
    followers: list[list[tuple[int, float]]] = [[] for _ in actions]
    waits_left = [0] * len(actions)
    ahead: dict[tuple[int, str], int] = {}

    def follows(k: int, other: int, away_s: float) -> None:
        followers[other].append((k, away_s))
        waits_left[k] += 1

    for k, action in enumerate(actions):
        for wait in action.waits:
            if wait not in number:
                raise DataError(f"{action.id} on rank {action.rank} waits for {wait}, which no rank runs")
            other = actions[number[wait]]
            away_s = 0.0 if latency_s is None or other.rank == action.rank else latency_s(other, action)
            follows(k, number[wait], away_s)
        lane = action.rank, action.kind.lane
        if action.kind.lane != "recv":
            if lane in ahead:
                follows(k, ahead[lane], 0.0)
            ahead[lane] = k
    start = [0.0] * len(actions)
    begun = [k for k, count in enumerate(waits_left) if count == 0]
    for k in begun:  # grows as actions may start
        end = start[k] + duration[k]
        for other, away_s in followers[k]:
            start[other] = max(start[other], end + away_s)
            waits_left[other] -= 1
            if waits_left[other] == 0:
                begun.append(other)
    return start if len(begun) == len(actions) else None


def _ledger(spans: Sequence[Span], holds: Mapping[str, float], caps: Sequence[float] | None) -> tuple[MemoryPoint, ...]:
    """Memory over time; at one moment, actions that end give back before actions that start take."""
    changes = []
    for span in spans:
        change = holds.get(span.action, 0.0)
        if change:
            changes.append((span.rank, span.start_s if change > 0 else span.end_s, change > 0, change, span.action))
    held: dict[int, float] = {}
    points = []
    for rank, time_s, _, change, action in sorted(changes, key=lambda c: c[:3]):
        held[rank] = held.get(rank, 0.0) + change
        if caps is not None and held[rank] > caps[rank] * (1 + 1e-9):
            raise DataError(f"{action} on rank {rank} makes it hold {held[rank]:g}, over its cap of {caps[rank]:g}")
        points.append(MemoryPoint(rank, time_s, held[rank]))
    return tuple(points)

"""Runs a schedule with a virtual clock: fixed lists of actions, several lanes per rank, a memory ledger.

An action starts when the action before it in its lane has ended, and all actions that it waits for have ended, plus the
latency between the two ranks. Receives are posted ahead, so they need not keep the order of their lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from plait.errors import DataError
from plait.schedule.action import Action
from plait.schedule.schedule import Schedule
from plait.schedule.timeline import MemoryPoint, Span, Timeline
from plait.schedule.validate import validate
from plait.simulator.kernels import longest_paths

Seconds = Mapping[str, float] | Callable[[Action], float]
"""Duration of an action: by its id, or from the action itself."""
Latency = Callable[[Action, Action], float]
"""Seconds that must pass between the end of the first action and the start of the second, which waits for it."""


class Program:
    """A schedule made ready to be run many times with different durations.

    Raises `DataError` when actions wait for each other.
    """

    def __init__(self, schedule: Schedule, latency_s: Latency | None = None):
        self.actions = tuple(schedule)
        number = {action.id: k for k, action in enumerate(self.actions)}
        edges: list[tuple[int, int, float]] = []
        ahead: dict[tuple[int, str], int] = {}
        for k, action in enumerate(self.actions):
            for wait in action.waits:
                if wait not in number:
                    raise DataError(f"{action.id} on rank {action.rank} waits for {wait}, which no rank runs")
                other = self.actions[number[wait]]
                away = 0.0 if latency_s is None or other.rank == action.rank else latency_s(other, action)
                edges.append((number[wait], k, away))
            lane = action.kind.lane
            if lane != "recv":
                if (action.rank, lane) in ahead:
                    edges.append((ahead[action.rank, lane], k, 0.0))
                ahead[action.rank, lane] = k
        edges.sort()
        count = len(self.actions)
        tails = np.asarray([tail for tail, _, _ in edges], np.int64)
        first = np.searchsorted(tails, np.arange(count + 1)).astype(np.int64)
        heads = np.asarray([head for _, head, _ in edges], np.int64)
        self.edges = (first, heads, np.asarray([seconds for _, _, seconds in edges], np.float64))
        """As `kernels.longest_paths` takes them: first edge of each action, where each edge leads, and its seconds."""
        self.num_waits = np.bincount(heads, minlength=count).astype(np.int64)
        """[n] how many edges lead to each action."""
        if self.starts_s(np.ones(count)) is None:
            validate(schedule)
            raise AssertionError("a schedule that passes validation deadlocked")

    def starts_s(self, seconds: np.ndarray) -> np.ndarray | None:
        """[n] start of every action, in the order of `actions`, for durations [n]; None when not all can start."""
        start = np.zeros(len(self.actions))
        queue = np.zeros(len(self.actions), np.int64)
        done = longest_paths(*self.edges, self.num_waits.copy(), seconds, start, queue)
        return start if done == len(self.actions) else None

    def durations_s(self, seconds: Seconds) -> np.ndarray:
        """[n] durations of `actions`; an id that a mapping does not name takes no time."""
        read = seconds if callable(seconds) else lambda action: seconds.get(action.id, 0.0)
        return np.asarray([read(action) for action in self.actions], np.float64)


def simulate(
    schedule: Schedule | Program,
    seconds: Seconds,
    *,
    holds: Mapping[str, float] | None = None,
    caps: Sequence[float] | None = None,
    latency_s: Latency | None = None,
) -> Timeline:
    """Run a schedule; return its predicted timeline.

    seconds: duration of each action
    holds:   action id → memory that it takes (above zero, at its start) or gives back (below zero, at its end)
    caps:    [num_ranks] the most that each rank may hold
    latency_s: between ranks, besides what sends take; not for a `Program`, which has its own

    Raises `DataError` when actions wait for each other, or a rank holds more than its cap.
    """
    program = schedule if isinstance(schedule, Program) else Program(schedule, latency_s)
    duration = program.durations_s(seconds)
    start = program.starts_s(duration)
    assert start is not None, "a program that was accepted deadlocked"
    spans = tuple(
        Span(a.id, a.kind.value, a.rank, t, t + d, a.bytes, 0, a.kind.lane, a.model)
        for a, t, d in zip(program.actions, start.tolist(), duration.tolist(), strict=True)
    )
    memory = () if holds is None else _ledger(spans, holds, caps)
    return Timeline(spans, memory).ordered()


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

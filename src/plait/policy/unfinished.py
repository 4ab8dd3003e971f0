"""Samples of a rollout that have not ended: when each of them does, and who has which of them after a migration."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import ceil
from typing import NamedTuple

StepTime = Callable[[int], float]
"""Seconds of one decode step of an instance with so many samples."""


class Left(NamedTuple):
    """An unfinished sample: decode steps that it still needs, and the part that it is scored with; None where nobody
    asks."""

    steps: int
    part: Hashable


def finish_times(steps: Sequence[int], step_s: StepTime, start_s: float = 0.0) -> list[float]:
    """When each sample of one instance ends, given the decode steps that each still needs; no loop over tokens.

    All run from the start, so between two ends the batch is constant: time grows by steps · t(active).
    """
    order = sorted(range(len(steps)), key=steps.__getitem__)
    ends = [start_s] * len(steps)
    now, done = start_s, 0
    for position, k in enumerate(order):
        if steps[k] > done:
            now += (steps[k] - done) * step_s(len(steps) - position)
            done = steps[k]
        ends[k] = now
    return ends


def steps_by(now: float, steps: Sequence[int], step_s: StepTime) -> int:
    """Decode steps that an instance has ended by `now`; one under way counts, for it ends before its samples move."""
    time_s, done = 0.0, 0
    for position, length in enumerate(sorted(steps)):
        if length > done:
            step_of_rest_s = step_s(len(steps) - position)
            if time_s + (length - done) * step_of_rest_s > now:
                return done + ceil((now - time_s) / step_of_rest_s - 1e-9)
            time_s += (length - done) * step_of_rest_s
            done = length
    return done


def merged(left: Sequence[Sequence[Left]], kept: int) -> list[list[Left]]:
    """The loads of the kept instances after migration: the fullest keep theirs, the others' longest go first."""
    ranked = sorted(left, key=lambda row: (-len(row), -sum(sample.steps for sample in row)))
    loads = [list(row) for row in ranked[:kept]]
    for sample in sorted((sample for row in ranked[kept:] for sample in row), key=lambda sample: -sample.steps):
        min(loads, key=len).append(sample)
    return loads

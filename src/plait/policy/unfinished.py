"""The unfinished samples of a rollout: when each one ends, and which instance has which samples after a migration.

A step is here what brings each running sample a token. Where draft tokens are accepted, a step of the engine is
several.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heapreplace
from math import ceil, inf
from typing import NamedTuple

StepTime = Callable[[int], float]
"""Seconds of one step of an instance with so many samples."""


class Left(NamedTuple):
    """An unfinished sample: steps that it still needs, and the part that it is scored with; None where nobody
    asks."""

    steps: int
    part: Hashable


def finish_times(steps: Sequence[int], step_s: StepTime, start_s: float = 0.0, slots: float = inf) -> list[float]:
    """When each sample of one instance ends, given the steps that each still needs; no loop over tokens.

    Between two ends the batch is constant: time grows by steps · t(running).

    Args:
        slots: samples that run at once; the next in order begins as one ends.
    """
    last = last_steps(steps, slots)
    order = sorted(range(len(steps)), key=last.__getitem__)
    ends = [start_s] * len(steps)
    now, done, left = start_s, 0, len(steps)
    for k in order:
        if last[k] > done:
            now += (last[k] - done) * step_s(left if left < slots else int(slots))
            done = last[k]
        ends[k] = now
        left -= 1
    return ends


def last_steps(steps: Sequence[int], slots: float) -> Sequence[int]:
    """The step after which each sample has ended, given the steps that each needs, where so many run at once."""
    if len(steps) <= slots:
        return steps
    last = list(steps)
    running = last[: int(slots)]
    heapify(running)
    for k in range(len(running), len(last)):
        last[k] = max(0, running[0]) + max(0, steps[k])
        heapreplace(running, last[k])
    return last


class Decoding:
    """One instance that decodes its samples from the start on; what is left of them at any time, without going through
    those that have ended.

    Args:
        steps: that each sample needs.
        slots: as of `finish_times`.
    """

    def __init__(self, steps: Sequence[int], step_s: StepTime, slots: float = inf) -> None:
        self._steps, self._step_s, self._slots = steps, step_s, slots
        self.ends = finish_times(steps, step_s, slots=slots)
        """When each sample ends."""
        self._last = last_steps(steps, slots)
        self._order = sorted(range(len(steps)), key=self._last.__getitem__)
        self._in_order = [self.ends[k] for k in self._order]

    @property
    def last_s(self) -> float:
        """When the last one ends; 0 without any."""
        return self._in_order[-1] if self._in_order else 0.0

    def left(self, now: float, parts: Sequence[Hashable]) -> list[Left]:
        """What has not ended by `now`, in the order of the samples. A step that is under way counts as done, for it
        ends before samples move.

        Args:
            parts: of all samples.
        """
        ended = bisect_right(self._in_order, now)
        if ended == len(self._order):
            return []
        done = max(0, self._last[self._order[ended - 1]]) if ended else 0
        since_s = self._in_order[ended - 1] if ended else 0.0
        running = int(min(self._slots, len(self._order) - ended))
        done += ceil((now - since_s) / self._step_s(running) - 1e-9)
        # One that waits for a place needs all of its steps.
        return [Left(min(self._steps[k], self._last[k] - done), parts[k]) for k in sorted(self._order[ended:])]


def merged(left: Sequence[Sequence[Left]], kept: int) -> list[list[Left]]:
    """The loads of the kept instances after migration: the fullest keep theirs, the others' longest go first."""
    ranked = sorted(left, key=lambda row: (-len(row), -sum(sample.steps for sample in row)))
    loads = [list(row) for row in ranked[:kept]]
    fewest = [(len(load), place) for place, load in enumerate(loads)]
    heapify(fewest)
    for sample in sorted((sample for row in ranked[kept:] for sample in row), key=lambda sample: -sample.steps):
        count, place = fewest[0]
        loads[place].append(sample)
        heapreplace(fewest, (count + 1, place))
    return loads

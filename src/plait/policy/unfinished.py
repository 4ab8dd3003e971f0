"""Samples of a rollout that have not ended: when each of them does, and who has which of them after a migration.

A step is here what brings each running sample a token. Where guesses come true, a step of the engine is several.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from heapq import heapify, heapreplace
from math import ceil
from typing import NamedTuple

StepTime = Callable[[int], float]
"""Seconds of one step of an instance with so many samples."""


class Left(NamedTuple):
    """An unfinished sample: steps that it still needs, and the part that it is scored with; None where nobody
    asks."""

    steps: int
    part: Hashable


def finish_times(steps: Sequence[int], step_s: StepTime, start_s: float = 0.0) -> list[float]:
    """When each sample of one instance ends, given the steps that each still needs; no loop over tokens.

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


class Decoding:
    """One instance that decodes its samples from the start on; what is left of them at any time, without going through
    those that have ended.

    Args:
        steps: that each sample needs.
    """

    def __init__(self, steps: Sequence[int], step_s: StepTime) -> None:
        self._steps, self._step_s = steps, step_s
        self.ends = finish_times(steps, step_s)
        """When each sample ends."""
        self._order = sorted(range(len(steps)), key=steps.__getitem__)
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
        done = max(0, self._steps[self._order[ended - 1]]) if ended else 0
        since_s = self._in_order[ended - 1] if ended else 0.0
        done += ceil((now - since_s) / self._step_s(len(self._order) - ended) - 1e-9)
        return [Left(self._steps[k] - done, parts[k]) for k in sorted(self._order[ended:])]


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

"""Samples of a rollout that have not ended: when each of them does, and who has which of them after a migration.

A step is here what brings each running sample a token. Where guesses come true, a step of the engine is several.
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
    """When each sample of one instance ends, given the steps that each still needs; as of `Decoding`."""
    return Decoding(steps, step_s, start_s, slots).ends


class Decoding:
    """One instance that decodes its samples from a start on; what is left of them at any time, without going through
    those that have ended. No loop over tokens: between two ends the batch is constant, and time grows by
    steps · t(running).

    Args:
        steps: that each sample needs.
        slots: samples that run at once; the next in order begins as one ends.
    """

    def __init__(self, steps: Sequence[int], step_s: StepTime, start_s: float = 0.0, slots: float = inf) -> None:
        self._step_s, self._slots, self._start_s = step_s, slots, start_s
        self._begun = _begun(steps, slots)
        self._last = [begun + max(0, needed) for begun, needed in zip(self._begun, steps, strict=True)]
        """Steps that are done when each sample has ended."""
        self._order = sorted(range(len(steps)), key=self._last.__getitem__)
        self.ends = [start_s] * len(steps)
        """When each sample ends."""
        now, done = start_s, 0
        for position, k in enumerate(self._order):
            if self._last[k] > done:
                now += (self._last[k] - done) * self._next_s(position)
                done = self._last[k]
            self.ends[k] = now

    def _next_s(self, ended: int) -> float:
        """Seconds of a step when so many samples have ended."""
        return self._step_s(int(min(self._slots, len(self._order) - ended)))

    @property
    def last_s(self) -> float:
        """When the last one ends; the start without any."""
        return self.ends[self._order[-1]] if self._order else self._start_s

    def left(self, now: float, parts: Sequence[Hashable]) -> list[Left]:
        """What has not ended by `now`, in the order of the samples. A step that is under way counts as done, for it
        ends before samples move.

        Args:
            parts: of all samples.
        """
        ended = bisect_right(self._order, now, key=self.ends.__getitem__)
        if ended == len(self._order):
            return []
        done = self._last[self._order[ended - 1]] if ended else 0
        since_s = self.ends[self._order[ended - 1]] if ended else self._start_s
        done += ceil((now - since_s) / self._next_s(ended) - 1e-9)
        return [Left(self._last[k] - max(done, self._begun[k]), parts[k]) for k in sorted(self._order[ended:])]


def _begun(steps: Sequence[int], slots: float) -> list[int]:
    """Steps that are done when each sample begins, so many of which run at once."""
    begun = [0] * len(steps)
    if len(steps) > slots:
        ends = [max(0, needed) for needed in steps[: int(slots)]]
        heapify(ends)
        for k in range(len(ends), len(steps)):
            begun[k] = ends[0]
            heapreplace(ends, begun[k] + max(0, steps[k]))
    return begun


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

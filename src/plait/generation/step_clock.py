"""How long a step keeps a rank busy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from plait.generation.joint import Joint

if TYPE_CHECKING:
    from plait.generation.overlap import Turns


class Captures(Protocol):
    """A forward that may capture steps, or what has one."""

    @property
    def capturing_s(self) -> float:
        """Seconds in which it has, so far."""
        ...


class StepClock:
    """Seconds that a step keeps this rank busy, from now on: without those in which it waits for others in it, in which
    weights are made ready, in which a step is captured to be replayed, and in which one before it lands."""

    def __init__(self, joint: Joint, turns: Turns, *captures: Captures) -> None:
        self._joint, self._turns, self._captures = joint, turns, captures
        self.packing_s = 0.0
        """In which weights were made ready."""
        self._began_s = self._now_s()

    @property
    def seconds(self) -> float:
        """By now."""
        return self._now_s() - self._began_s - self.packing_s

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Within it weights are made ready."""
        began_s = time.perf_counter()
        yield
        self.packing_s += time.perf_counter() - began_s

    def _now_s(self) -> float:
        capturing_s = sum(one.capturing_s for one in self._captures)
        return time.perf_counter() - self._joint.waited_s - capturing_s - self._turns.landing_s

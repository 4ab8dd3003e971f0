"""Steps in flight: launched, and their tokens not yet given to the samples; and how long each keeps this rank busy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

from plait.data.records import Sample
from plait.generation.drawing import Draws
from plait.generation.forward import Forward
from plait.generation.joint import Joint
from plait.policy.batching import Scheduler
from plait.policy.step import Key, StepPlan


@dataclass(frozen=True)
class Turn:
    """A step in flight."""

    plan: StepPlan
    starts: Draws | None
    """First tokens that samples drew before it, so that they have a row in it; None: there were none, or they are
    known."""
    draws: Draws | None
    """None: no sample draws in it."""
    seconds: float
    """How long this rank was busy with it so far."""


class StepClock:
    """Seconds that a step keeps this rank busy, from now on: without those in which it waits for others in it, in which
    weights are made ready, and in which a step is captured to be replayed."""

    def __init__(self, joint: Joint, forward: Forward) -> None:
        self._joint, self._forward = joint, forward
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
        return time.perf_counter() - self._joint.waited_s - self._forward.capturing_s


@dataclass
class Landed:
    """The results of landed steps, until `Engine.step` returns them."""

    finished: list[Sample]
    num_drawn: int = 0


class Turns:
    """The steps in flight of an engine, oldest first. They land in this order, at the same place in the order of
    decisions on all ranks of an instance."""

    def __init__(self) -> None:
        self._open: deque[Turn] = deque()
        self.landed = Landed([])
        """Results since `take_landed`."""

    def __len__(self) -> int:
        return len(self._open)

    def launch(self, turn: Turn) -> None:
        """Add a step that was launched."""
        self._open.append(turn)

    @property
    def newest(self) -> Turn | None:
        """The step that was launched last, if it is in flight."""
        return self._open[-1] if self._open else None

    def oldest(self) -> Turn:
        """Remove and return the oldest step."""
        return self._open.popleft()

    def take_landed(self) -> Landed:
        """The results of the steps that landed since the last call."""
        landed, self.landed = self.landed, Landed([])
        return landed

    @property
    def drawing(self) -> set[Key]:
        """Samples whose last token is not known yet."""
        return {response.key for turn in self._open if turn.draws is not None for response in turn.draws.samples}

    def num_next(self, scheduler: Scheduler, plan: StepPlan, num_groups: int) -> int:
        """Rows of the step after a planned one, if no sample ends or comes: samples that wait for their turn, and those
        whose tokens will be known by then.

        Args:
            plan: decided, not launched.
            num_groups: how many steps are in flight, the planned one included, when the next one is launched.
        """
        running = len(scheduler.running)
        landing = [*(turn.plan for turn in self._open), plan]
        landing = landing[: max(0, len(landing) + 1 - num_groups)]
        idle = running - len(self.drawing) - len(plan.drawn) + sum(len(other.drawn) for other in landing)
        return min(idle, ceil(running / num_groups))

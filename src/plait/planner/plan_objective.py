"""What a plan is worth: seconds of a step, more where it does not fit in memory or leaves devices idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.planner.plan_problem import PlanProblem
from plait.planner.plan_space import fused_slots
from plait.planner.step_bound import StepBound
from plait.simulator.places import Place
from plait.simulator.step_simulator import StepSimulator

EXCESS_WEIGHT = 3.0
"""What too much memory weighs, as a share of a device's."""
MISFIT = 0.1
"""The share of a step's seconds that any plan pays that cannot be used."""
LEAST_FUSED_GAIN = 0.03
"""The share of a step that training two roles together must gain over training one after the other."""


def weighed_s(seconds: float, places: Sequence[Place]) -> float:
    """Seconds of a step as plans are compared by them: where roles train together they count for more, so that such a
    plan is better than one that trains them apart only if it gains `LEAST_FUSED_GAIN`."""
    return seconds / (1 - LEAST_FUSED_GAIN) if fused_slots(places) else seconds


@dataclass(frozen=True)
class Valued:
    """value: what a search makes small; seconds: of a step; excess: of memory on the fullest rank, as a share of its
    device's; idle: ranks that do nothing"""

    value: float
    seconds: float
    excess: float
    idle: int

    @property
    def usable(self) -> bool:
        return self.excess <= 0 and self.idle == 0


class Objective:
    """Values plans, each once.

    evaluations: steps simulated so far
    """

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._simulator = StepSimulator(problem.graph, problem.costs)
        self.evaluations = 0
        cluster = problem.costs.cluster
        self._limits = np.array([cluster.memory_of(rank) for rank in range(problem.num_devices)], float)
        self._everyone = (1 << problem.num_devices) - 1
        self._known: dict[tuple[Place, ...], Valued] = {}
        self._seconds: dict[tuple[Place, ...], float] = {}
        self._bound = StepBound(problem.graph, self._simulator.functions_s)

    def __call__(self, places: Sequence[Place]) -> Valued:
        key = tuple(places)
        valued = self._known.get(key)
        if valued is None:
            valued = self._known[key] = self._valued(key)
        return valued

    def if_it_fits(self, places: Sequence[Place]) -> float:
        """What a plan is worth that has room for everything: no more than its value. Plays it; memory is left out."""
        worth = weighed_s(self._seconds_of(tuple(places)), places)
        return worth + worth * self._idleness(self._idle(places))

    @property
    def has_bounds(self) -> bool:
        """Whether `bound` says anything. Not where keys and values take what is left of a device: how many samples that
        has room for is known when a plan is played, and fewer at a time may be predicted to take less."""
        return not self._problem.costs.pool_takes_rest

    def bound(self, places: Sequence[Place]) -> float:
        """No more than the value of a plan, in a small part of the time; memory is left out. 0 without `has_bounds`."""
        if not self.has_bounds:
            return 0.0
        worth = weighed_s(self._bound(places), places)
        return worth + worth * self._idleness(self._idle(places))

    def _idleness(self, idle: int) -> float:
        """What a plan that leaves so many devices idle is worth less, as a share."""
        return idle / self._problem.num_devices + MISFIT if idle else 0.0

    def _idle(self, places: Sequence[Place]) -> int:
        used = 0
        for place in places:
            used |= place.mask
        return (self._everyone & ~used).bit_count()

    def _seconds_of(self, places: tuple[Place, ...]) -> float:
        """What a step takes."""
        seconds = self._seconds.get(places)
        if seconds is None:
            self.evaluations += 1
            seconds = self._seconds[places] = self._simulator.play(places).step_s
        return seconds

    def _valued(self, places: tuple[Place, ...]) -> Valued:
        seconds = self._seconds_of(places)
        excess = max(0.0, float((self._simulator.peak_bytes(places) / self._limits).max()) - 1.0)
        value = worth = weighed_s(seconds, places)
        idle = self._idle(places)
        if excess > 0:
            value += worth * (EXCESS_WEIGHT * excess + MISFIT)
        value += worth * self._idleness(idle)
        return Valued(value, seconds, excess, idle)

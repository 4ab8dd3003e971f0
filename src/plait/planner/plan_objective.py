"""What a plan is worth: seconds of a step, more where it does not fit in memory or leaves devices idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.planner.plan_problem import PlanProblem
from plait.planner.plan_space import fused_slots
from plait.simulator.places import Place
from plait.simulator.step_program import IDLE
from plait.simulator.step_simulator import StepSimulator
from plait.simulator.tails import LAST_SHARE

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
class Judged:
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
    """Judges plans, each once.

    evaluations: steps simulated so far
    """

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self._simulator = StepSimulator(problem.graph, problem.costs)
        self.evaluations = 0
        cluster = problem.costs.cluster
        self._limits = np.array([cluster.memory_of(rank) for rank in range(problem.num_devices)], float)
        self._everyone = (1 << problem.num_devices) - 1
        self._known: dict[tuple[Place, ...], Judged] = {}
        self._least: dict[Place, float] = {}

    def __call__(self, places: Sequence[Place]) -> Judged:
        key = tuple(places)
        judged = self._known.get(key)
        if judged is None:
            judged = self._known[key] = self._judged(key)
        return judged

    def bound(self, places: Sequence[Place]) -> float:
        """No more than the value of a plan, in a hundredth of the time: what the ranks at either end of each mesh
        compute."""
        rows = [(place.mask, self._least_s(place)) for place in places]
        least = 0.0
        for mask, _ in rows:
            for rank in (mask & -mask, 1 << mask.bit_length() - 1):
                least = max(least, sum(seconds for other, seconds in rows if other & rank))
        return least

    def _least_s(self, place: Place) -> float:
        """Seconds of a place's calls, whatever of them is behind others."""
        seconds = self._least.get(place)
        if seconds is None:
            graph, seconds = self._problem.graph, sum(place.seconds)
            mode = graph.slots[place.slot].mode
            if mode == "score" and graph.fuses:
                seconds *= LAST_SHARE
            elif mode == "train":
                seconds -= sum(cost.terms.get(IDLE, 0.0) for cost in place.costs)
            elif place.costs[0].tails:
                seconds += min(tail.end_s for tail in place.costs[0].tails) - place.costs[0].tails[0].end_s
            self._least[place] = seconds
        return seconds

    def _judged(self, places: tuple[Place, ...]) -> Judged:
        self.evaluations += 1
        played = self._simulator.play(places)
        seconds = played.step_s
        excess = max(0.0, float((played.peak / self._limits).max()) - 1.0)
        used = 0
        for place in places:
            used |= place.mask
        idle = (self._everyone & ~used).bit_count()
        value = worth = weighed_s(seconds, places)
        if excess > 0:
            value += worth * (EXCESS_WEIGHT * excess + MISFIT)
        if idle:
            value += worth * (idle / self._problem.num_devices + MISFIT)
        return Judged(value, seconds, excess, idle)

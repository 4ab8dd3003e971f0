"""How long a pipeline schedule takes and what it holds, in exact terms of its workload: no links, no lanes.

The search goes by these numbers; `plait.simulator` runs the same schedule with lanes, links and a clock, and agrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.errors import DataError
from plait.planner.kernels import evaluate, peaks
from plait.planner.tables import Ints, Tables, order_of, tables_of
from plait.schedule.pipeline import Workload
from plait.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Score:
    """makespan in the unit of the workload's durations, the most memory that each rank holds, and the idle share of
    each rank.
    """

    makespan: float
    peak_memory: tuple[float, ...]
    bubble: tuple[float, ...]

    @property
    def worst_peak(self) -> float:
        return max(self.peak_memory)


def score(workload: Workload, schedule: Schedule) -> Score:
    """Run the schedule. Raises `DataError` when it deadlocks."""
    t = tables_of(workload)
    order = order_of(workload, schedule)
    return score_order(workload, t, order)


def score_order(workload: Workload, t: Tables, order: Ints) -> Score:
    """`score` for an order of action numbers. Raises `DataError` when it deadlocks."""
    makespan = evaluate(t, order, np.inf, np.empty(len(order)), np.empty(3 * workload.num_ranks, np.int64))
    if makespan == np.inf:
        raise DataError("the schedule deadlocks: some actions wait for each other")
    peak = np.empty(workload.num_ranks)
    peaks(t, order, peak)
    bubble = tuple(1.0 - work / makespan if makespan else 0.0 for work in workload.work_s())
    return Score(float(makespan), tuple(peak.tolist()), bubble)


def serial_makespan(workload: Workload, schedules: dict[str, Schedule]) -> float:
    """Seconds of the models one after the other with a barrier between; `schedules` has one for each model alone."""
    return sum(score(workload.only(model), schedule).makespan for model, schedule in schedules.items())

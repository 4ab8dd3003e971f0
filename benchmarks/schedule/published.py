"""RLHFuse's twelve fused-schedule problems, and what is known about them.

The problems, the lower bounds, the greedy and the best schedules are those of the authors' release (FlexFusion,
Apache-2.0), in its units: forward times are whole numbers, a backward takes twice its forward, activation memory is
in units of the second model's micro-batch. `peak_memory` is the least that they report at their makespan. Problem 9 is
the one in which their search does not reach the bound (613 instead of 606).
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.schedule.pipeline import Workload, fused_workload


@dataclass(frozen=True)
class Problem:
    """stages N, microbatches M of each copy, forward f, memory a of the two models, and the published results."""

    number: int
    pair: str
    stages: tuple[int, int]
    microbatches: tuple[int, int]
    forward: tuple[int, int]
    memory: tuple[float, float]
    serial: int
    opposite: int
    greedy: int
    greedy_memory: float
    makespan: int
    lower_bound: int
    simple_bound: int
    peak_memory: float

    @property
    def workload(self) -> Workload:
        return fused_workload(
            self.stages, self.microbatches, self.forward, activation=self.memory, models=("actor", "critic")
        )


_ROWS = (
    ("33B+13B", (8, 4), (32, 16), (5, 4), (1.95, 2), 813, 798, 741, 42.90, 708, 708, 672, 19.70),
    ("33B+13B", (8, 4), (16, 8), (5, 4), (1.95, 2), 477, 462, 425, 33.30, 372, 372, 345, 15.75),
    ("33B+13B", (8, 4), (8, 4), (5, 4), (1.95, 2), 309, 294, 239, 23.60, 225, 225, 225, 15.60),
    ("33B+13B", (8, 8), (32, 32), (5, 2), (1.95, 1), 819, 791, 755, 42.90, 702, 702, 672, 20.50),
    ("33B+13B", (8, 8), (16, 16), (5, 2), (1.95, 1), 483, 455, 419, 31.25, 366, 366, 345, 18.55),
    ("33B+13B", (8, 8), (8, 8), (5, 2), (1.95, 1), 315, 287, 225, 23.60, 225, 225, 225, 15.60),
    ("65B+33B", (16, 8), (64, 32), (2, 2), (1.64, 2), 708, 694, 632, 75.44, 618, 618, 576, 39.72),
    ("65B+33B", (16, 8), (32, 16), (2, 2), (1.64, 2), 420, 406, 366, 58.48, 330, 330, 288, 29.88),
    ("65B+33B", (16, 8), (16, 8), (2, 2), (1.64, 2), 276, 262, 214, 42.24, 186, 186, 186, 26.24),
    ("65B+33B", (16, 16), (64, 64), (2, 1), (1.64, 1), 711, 681, 651, 75.44, 613, 606, 576, 38.72),
    ("65B+33B", (16, 16), (32, 32), (2, 1), (1.64, 1), 423, 393, 363, 52.48, 318, 318, 288, 32.16),
    ("65B+33B", (16, 16), (16, 16), (2, 1), (1.64, 1), 279, 249, 219, 41.24, 186, 186, 186, 26.24),
)

PROBLEMS = tuple(Problem(number, *row) for number, row in enumerate(_ROWS))

"""When the last samples of a rollout are gathered (`fusion: auto`): where that is foretold to gain more than it costs.

At the beginning of a rollout a threshold is tuned on the lengths of the last steps (`threshold.tune`); when so few
samples are unfinished, and as each of them ends, what is left is judged again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from plait.policy.threshold import Rollout, drained, finish_times, merged, tune
from plait.schedule.plan import FUSION, Plan

LEAST_SHARE = 0.02
"""What gathering must gain, of a step."""
TIMES_MOVES = 3.0
"""As much as the moves take, that gathering must gain."""
DRAWS = 4
THRESHOLDS = 16
"""That are tried, up to half of the samples."""


def fuses(fusion: float | str, plan: Plan) -> bool:
    """Whether models score in parts where samples are generated, and samples may be gathered.

    That follows from recipe and plan alone, as it decides what is scored together; when samples move, which changes
    no number, `auto` leaves to the clock.
    """
    if fusion == "auto":
        return any(one.name == FUSION for one in plan.policies)
    return fusion != "off"


@dataclass(frozen=True)
class Seen:
    """What the last steps took.

    fixed_s, each_s: seconds of a decode step, and more for each sample in it
    score_s:         of one instance to score a sample, by all models that score where samples are generated
    move_s:          in which samples that move stand still
    step_s:          of a training step
    """

    fixed_s: float
    each_s: float
    score_s: float
    move_s: float
    step_s: float

    @property
    def needed_s(self) -> float:
        """That gathering must gain."""
        return max(LEAST_SHARE * self.step_s, TIMES_MOVES * self.move_s)

    def decode_s(self, running: int) -> float:
        return self.fixed_s + self.each_s * running

    def rollout(self, instances: int, max_batch: int) -> Rollout:
        return Rollout(instances, self.decode_s, self.score_s, max_batch, self.move_s, frees=True)


@dataclass(frozen=True)
class Choice:
    """threshold: unfinished samples from which on gathering is judged; 0: it is not in this rollout"""

    threshold: int
    gain_s: float = 0.0
    needed_s: float = 0.0
    why: str = ""


def choose(seen: Seen | None, lengths: Sequence[int], batch: int, instances: int, max_batch: int, seed: int) -> Choice:
    """What to do in a rollout of `batch` samples.

    Args:
        lengths: of responses of the last steps.
        seed: of the draws from them.
    """
    if seen is None or not lengths:
        return Choice(0, why="no step was measured yet")
    if instances < 2 or seen.score_s <= 0:
        return Choice(0, why="nothing could be scored meanwhile")
    tried = range(0, batch // 2 + 1, max(1, batch // 2 // THRESHOLDS))
    found = tune(seen.rollout(instances, max_batch), lengths, batch, draws=DRAWS, seed=seed, thresholds=tried)
    gain = found.serial_s - found.total_s
    if gain < seen.needed_s:
        return Choice(0, gain, seen.needed_s, "it would gain too little")
    return Choice(found.threshold, gain, seen.needed_s)


def gain_s(
    seen: Seen, lengths: Sequence[int], running: Sequence[int], steps_done: int, waiting_s: float, max_batch: int
) -> float:
    """Seconds that gathering now would gain.

    Args:
        lengths: of responses of the last steps: those that are longer than `steps_done` say what is left.
        running: unfinished samples of each instance.
        waiting_s: instance seconds of scoring that wait.
    """
    left = sorted(length - steps_done for length in lengths if length > steps_done)
    count = sum(running)
    if not left or count == 0:
        return 0.0
    quantiles = [left[(2 * i + 1) * len(left) // (2 * count)] for i in range(count)]
    rows: list[list[int]] = [[] for _ in running]
    open_places = [place for place, number in enumerate(running) for _ in range(number)]
    # By turns, so that no instance has all of the long ones.
    order = sorted(range(count), key=lambda k: (open_places[:k].count(open_places[k]), open_places[k]))
    for quantile, k in zip(quantiles, order, strict=True):
        rows[open_places[k]].append(quantile)
    kept = max(1, ceil(count / max_batch))
    if kept >= sum(1 for row in rows if row):
        return 0.0
    rollout = seen.rollout(len(running), max_batch)
    stay = drained(rollout, [finish_times(row, seen.decode_s) for row in rows], 0.0, waiting_s)
    loads = [finish_times(load, seen.decode_s, seen.move_s) for load in merged(rows, kept)]
    return stay - drained(rollout, loads, 0.0, waiting_s)


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(value at 0, slope) of the straight line through (samples, seconds) with the least squares, neither below 0."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread > 0 else 0.0
    slope = min(max(0.0, slope), mean_y / mean_x if mean_x > 0 else 0.0)
    return mean_y - slope * mean_x, slope

"""Whether samples of a rollout are scored in parts, on ranks that have none left to generate (`fusion: auto`).

Parts take longer than whole calls, and ranks that score them do not end together; so there are parts only in steps
where they are predicted to gain more. What is packed together decides roundings: nothing here is measured in the run.
The same plan and the same lengths of earlier responses decide the same, on every machine and in a run that is resumed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from plait.policy.fusion_gate import LEAST_SHARE, WRONG, RolloutSize, num_draws, thresholds_of
from plait.policy.migration import STEPS_OF_A_MOVE
from plait.policy.threshold import Course, Gathered, Outcome, Rollout, kept_counts, outcome
from plait.policy.tuning import best_way
from plait.schedule.fusion_times import FusionTimes

LAST_SHARE = 1 / 4
"""The share of all scoring that is behind the last sample at least: groups end late that have a long one."""
SPLITS = (1 / 16, 1 / 8, 1 / 4)
"""Shares of all samples that may be unfinished when groups are split."""
APART = 1 / 16
"""The share of the last call that scores by which ranks that score parts end apart."""

Draw = tuple[Sequence[Sequence[int]], float]
"""Steps of each sample of each instance, and tokens of a sample in the mean, its share of the prompt included."""


@dataclass(frozen=True)
class EarlyScores:
    """gain_s: seconds that scoring in parts is predicted to gain; of_s: of generation and scoring without; num_split:
    unfinished samples at which groups are split, as `threshold.Rollout` has them"""

    gain_s: float
    of_s: float
    num_split: int = 0

    @property
    def pays(self) -> bool:
        return self.gain_s >= LEAST_SHARE * self.of_s and self.gain_s > 0


def predicted(times: FusionTimes, groups: Sequence[Sequence[int]], size: RolloutSize, *, seed: int = 0) -> EarlyScores:
    """What scoring in parts would gain in a rollout, in the mean of some that are drawn.

    Args:
        groups: lengths of the responses of each prompt of earlier steps; without any, nothing is predicted to be
        gained.
        seed: of the draws.
    """
    groups = [group for group in groups if group]
    if not groups or size.instances < 2:
        return EarlyScores(0.0, 0.0)
    rng = random.Random(seed)
    count = max(1, size.samples // max(1, size.together))
    draws = [
        [rng.choices(group, k=size.together) for group in rng.choices(groups, k=count)]
        for _ in range(num_draws(size.samples))
    ]
    # Steps of each sample of each instance; the first token of a response comes with its prompt.
    dealt = [
        [[length - 1 for group in draw[i :: size.instances] for length in group] for i in range(size.instances)]
        for draw in draws
    ]
    tokens = [sum(map(sum, draw)) / (count * size.together) + times.prompt_tokens / size.together for draw in draws]
    return _least_gain(times, [*zip(dealt, tokens, strict=True)], size)


def _least_gain(times: FusionTimes, draws: Sequence[Draw], size: RolloutSize) -> EarlyScores:
    """As predicted; nothing, where that could lose if times are wrong. Groups are split where that gains by the least
    share more."""
    believed = _gain(times, draws, size)
    if size.together > 1:
        counts = sorted({int(share * size.samples) for share in SPLITS} - {0})
        split = [_gain(times, draws, replace(size, num_split=count)) for count in counts]
        best = max((believed, *split), key=lambda early: early.gain_s)
        if best.pays and best.gain_s - believed.gain_s >= LEAST_SHARE * believed.of_s:
            believed = best
    chosen_size = replace(size, num_split=believed.num_split)
    if believed.pays and any(_gain(doubted, draws, chosen_size).gain_s < 0 for doubted in _doubted(times)):
        return EarlyScores(0.0, believed.of_s)
    return believed


def _gain(times: FusionTimes, draws: Sequence[Draw], size: RolloutSize) -> EarlyScores:
    """With the last samples gathered in the way that gains most, of those that a run tries."""
    plain_s, courses = 0.0, []
    for steps, tokens in draws:
        rollout = _rollout(times, tokens, size)
        plain_s += outcome(replace(rollout, frees=False), steps, 0).total_s / len(draws)
        courses.append((Course(rollout, steps), size.samples * rollout.score_s / size.instances))

    def early_s(way: Gathered) -> float:
        return sum(_ended(course.gathered(way), all_s) for course, all_s in courses) / len(draws)

    best = best_way(early_s, thresholds_of(size.samples), kept_counts(size.instances))
    return EarlyScores(plain_s - early_s(best) - times.parts_s / size.instances, plain_s, size.num_split)


def _ended(end: Outcome, scores_s: float) -> float:
    """When all is scored."""
    return max(end.total_s, end.generation_s + LAST_SHARE * scores_s)


def _rollout(times: FusionTimes, tokens: float, size: RolloutSize) -> Rollout:
    return Rollout(
        size.instances,
        lambda running: times.step_s + times.more_s * max(0, running - 1),
        times.token_s * tokens,
        size.max_batch,
        STEPS_OF_A_MOVE * times.step_s * times.step_tokens,
        frees=True,
        together=size.together,
        num_split=size.num_split,
        again_s=times.token_s * times.prompt_tokens,
        slots=size.max_batch,
    )


def _doubted(times: FusionTimes) -> list[FusionTimes]:
    """What things may take in truth, where a gain is least."""
    more, less = 1 + WRONG, 1 - WRONG
    return [
        replace(
            times,
            step_s=step * times.step_s,
            more_s=more * times.more_s,
            token_s=score * times.token_s,
            parts_s=more * times.parts_s,
        )
        for step, score in product((less, more), repeat=2)
    ]

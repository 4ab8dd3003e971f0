"""What scoring gives: scores per function, their weighted sum, and what went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from plait.data.records import Sample
from plait.rewards.function_kinds import REWARD, Kind

NONE = math.nan
"""No score: the function does not apply, or failed. Among rewards: the sample has none and is not trained on."""


MODEL = "model"
"""What the scores of a reward model are called among those of functions; those of further ones as of `nth`."""


def nth(name: str, place: int) -> str:
    """What belongs to one of several models: `model`, `model_2`, `model_3`, …; by its place, from 0."""
    return name if place == 0 else f"{name}_{place + 1}"


class FailureKind(StrEnum):
    RAISED = "raised"
    TIMEOUT = "timeout"
    DIED = "died"
    MISCOUNTED = "miscounted"
    NO_SCORE = "no score"
    """NaN, an infinity, or something that is no number."""


@dataclass(frozen=True)
class Failure:
    """A function that gave no usable score for a sample."""

    uid: str
    """Who the sample is."""
    function: str
    kind: FailureKind
    message: str
    traceback: str = ""
    """The worker's own, or the stack at which it hung or crashed; empty if there is none."""
    response: str = ""
    prompt: str = ""
    """The column `prompt` of its row, or where that holds messages, all of them after the chat template."""
    of: Kind = REWARD
    """What the function gives."""
    where: str = ""
    """What messages call the sample, and the turn that a reply was asked for."""

    @property
    def error(self) -> str:
        """What went wrong, and where."""
        return "\n".join(filter(None, (self.message, self.traceback.rstrip())))

    def __str__(self) -> str:
        lines = [f"{self.of.noun} `{self.function}` failed on {self.where}: {self.error}"]
        lines += [f"the prompt was: {self.prompt!r:.300}", f"the response was: {self.response!r:.300}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Worked:
    """A call of a function, as its worker did it."""

    function: str
    worker: int
    """Place of the worker in its pool."""
    start_s: float
    """On the clock that all processes of a machine share, `time.perf_counter`; so is `end_s`."""
    end_s: float
    """When it came back, or was found to have failed."""
    beside: int = 0
    """Number of the call among those that the worker had under way, from 0."""


@dataclass(frozen=True)
class GroupScores:
    """The scores of one submitted group, all in the order of its samples."""

    ticket: int
    """What `RewardPool.submit` returned."""
    samples: tuple[Sample, ...]
    scores: Mapping[str, tuple[float, ...]]
    """Function name → raw scores before weighting; NaN where it does not apply or failed."""
    rewards: tuple[float, ...]
    """Weighted sums; NaN for a sample that has no reward."""
    by_turn: tuple[tuple[float, ...], ...] = ()
    """What each reward is the sum of, one number for each turn: what functions gave for the whole response counts in
    its last turn. Without meaning for a sample that has no reward."""
    failures: tuple[Failure, ...] = ()
    recovered: tuple[str, ...] = ()
    """Failures of a call for the whole group that none of its samples showed alone, in words."""
    extras: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Columns that functions logged (`log_extra`), such as the verdicts of a task; None where nothing was logged."""
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values that functions logged (`log_metric`)."""
    worked: tuple[Worked, ...] = field(default=(), compare=False)
    """What the calls took, retries of samples alone included."""

    def told(self, place: int, role: str) -> dict[str, float | None]:
        """What a record of a sample says of its scores, each before its weight: `rewards/NAME` for the role `reward`,
        as the curve of the function is named. None: it does not apply, or failed."""
        values = {f"{role}s/{name}": scores[place] for name, scores in self.scores.items()}
        return {name: None if math.isnan(value) else value for name, value in values.items()}


def weighted_reward(scores: Sequence[float | None], weights: Sequence[float], failed: bool = False) -> float:
    """Σ weight · score over the functions that apply (a score of None does not); NaN if none does, or one failed."""
    pairs = [(score, weight) for score, weight in zip(scores, weights, strict=True) if score is not None]
    if failed or not pairs:
        return NONE
    return math.fsum(score * weight for score, weight in pairs)


def weighted_turns(by_turn: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[float, ...]:
    """Σ weight · score of each turn.

    Args:
        by_turn: for each function, its score of each turn; 0 where it does not apply.
    """
    return tuple(
        math.fsum(score * weight for score, weight in zip(scores, weights, strict=True))
        for scores in zip(*by_turn, strict=True)
    )

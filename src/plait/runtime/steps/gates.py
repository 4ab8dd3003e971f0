"""Who says when the last samples of rollouts are gathered: of a run a gate, of one rollout what it has decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from plait.policy.early_scores import EarlyScores
from plait.policy.fusion_gate import Remaining, RolloutSize
from plait.policy.migration import AT_ONCE, HowToMove
from plait.policy.step import Key
from plait.schedule.timeline import Timeline

LOOKING = 0.05
"""Share of the time of a rollout that predicting its end may take: with hundreds of instances it takes seconds, and
some sample has ended, or some instance has half of its samples left, after almost every step."""


class Gate(Protocol):
    """Says in each rollout whether its samples are scored in parts, whether its end is gathered, and when."""

    def early(self, step: int, call: str, size: RolloutSize) -> EarlyScores:
        """Whether the samples of a rollout are scored in parts, and groups split; `step` counts from 0."""
        ...

    def deciding(self, step: int, call: str, size: RolloutSize) -> Decides:
        """What decides in a rollout; `step` counts from 0."""
        ...

    def learn(self, timeline: Timeline, lengths: Sequence[int], instances: int) -> None:
        """After a step.

        Args:
            timeline: what every rank did in it.
            lengths: of its responses.
            instances: that generate.
        """
        ...


class Decides(Protocol):
    """Says of one rollout whether to gather what is left, each time that a sample has ended."""

    clock: Callable[[], float]

    @property
    def threshold(self) -> int:
        """Unfinished samples from which on gathering is weighed; 0: it is not."""
        ...

    def gathers(self, left: Remaining) -> int:
        """Instances in which what is left is gathered now, where no more than the threshold is; 0: it is not."""
        ...

    def score_s(self) -> float:
        """Seconds of scoring a sample, by one instance."""
        ...

    def how(self, contexts: Mapping[Key, int]) -> HowToMove:
        """How the samples move that are gathered now.

        Args:
            contexts: of each its tokens, about.
        """
        ...

    def end(self, num_moved: int, move_s: float | None) -> None:
        """All samples have ended."""
        ...


@dataclass(frozen=True)
class AtShare:
    """The share of a rollout's samples that are unfinished at most when they are gathered, at once, in as few instances
    as hold them; nothing is weighed or kept. 0: they end where they begin. See `Gate`."""

    share: float = 0.0

    def early(self, step: int, call: str, size: RolloutSize) -> EarlyScores:
        return EarlyScores(inf, 0.0, int(self.share * size.samples))

    def deciding(self, step: int, call: str, size: RolloutSize) -> AtThreshold:
        return AtThreshold(int(self.share * size.samples))

    def learn(self, timeline: Timeline, lengths: Sequence[int], instances: int) -> None:
        pass


@dataclass
class AtThreshold:
    """So many samples are unfinished at most when they are gathered. See `AtShare` and `Decides`."""

    threshold: int
    clock: Callable[[], float] = field(default=lambda: 0.0)

    def gathers(self, left: Remaining) -> int:
        return left.kept

    def score_s(self) -> float:
        return 0.0

    def how(self, contexts: Mapping[Key, int]) -> HowToMove:
        return AT_ONCE

    def end(self, num_moved: int, move_s: float | None) -> None:
        pass

"""What an evaluation on a task's held-out items comes to: accuracy, form, and accuracy given the form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plait.rewards.answers import Verdict
from plait.rewards.scores import GroupScores
from plait.rewards.statistics import Estimate, paired_gain, wilson


@dataclass(frozen=True)
class Evaluation:
    """One verdict per item (one response each), in the order of the items."""

    verdicts: tuple[Verdict, ...]

    @property
    def num_items(self) -> int:
        return len(self.verdicts)

    @property
    def exact(self) -> Estimate:
        """Share of items whose answer got the scorer's full score."""
        return wilson(sum(self.right), self.num_items)

    @property
    def well_formed(self) -> Estimate:
        return wilson(sum(verdict.well_formed for verdict in self.verdicts), self.num_items)

    @property
    def exact_among_well_formed(self) -> Estimate | None:
        """None when no answer was well-formed."""
        formed = sum(verdict.well_formed for verdict in self.verdicts)
        return wilson(sum(self.right), formed) if formed else None

    @property
    def right(self) -> tuple[bool, ...]:
        return tuple(verdict is Verdict.EXACT for verdict in self.verdicts)

    def gain_over(self, before: Evaluation) -> Estimate:
        """Gain in exact accuracy over an earlier evaluation on the same items, with its paired 95 % interval."""
        return paired_gain(before.right, self.right)


def evaluation_of(groups: Sequence[GroupScores]) -> Evaluation:
    """Read the verdicts that `tasks.TaskReward` logged; one sample per group.

    A sample on which the scorer failed (hung, died) has no verdict; it counts as malformed, so that no item is lost.
    """
    verdicts = []
    for group in groups:
        assert len(group.samples) == 1, f"greedy evaluation has one sample per item, got {len(group.samples)}"
        logged = group.extras.get("verdict", (None,))[0]
        verdicts.append(Verdict.MALFORMED if logged is None else Verdict(logged))
    return Evaluation(tuple(verdicts))


def accuracy_of_rewards(groups: Sequence[GroupScores]) -> Estimate:
    """Share of samples whose reward is 1 or more, for rewards of a user's own; a sample without one counts as wrong."""
    rewards = [reward for group in groups for reward in group.rewards]
    return wilson(sum(not math.isnan(reward) and reward >= 1 for reward in rewards), len(rewards))

"""Which drafts of a batch are computed: those that give the most tokens per second. Numbers in, a decision out.

All draft tokens of the batch compete by their survival, the chance that they are accepted with all before them. With
the m likeliest of them a step gives B + S(m) tokens, S(m) the sum of their survivals, and takes T(B + m). Survival
falls along a chain, so the m likeliest are beginnings of chains.

How many may be computed is another question: as many as may all be wrong (`margin`).

Shapes: B samples, K tokens of a draft, M draft tokens, the likeliest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Self

import numpy as np
from numpy.typing import NDArray

from plait.kernels import draft_choice
from plait.speculation.drafter import DraftTokens
from plait.speculation.pool import FloatArray, IntArray
from plait.speculation.step_cost import StepCost

LEAST_GAIN = 1.04
"""Expected tokens per second against those without drafts, from which on drafts are computed: the estimates err."""
LEAST_SURVIVAL = 0.03
"""A draft is not looked up any further where it is less likely to be accepted."""
HELD_BACK = 0.4
"""Share of what may be lost that a lone sample's drafts leave for the next ones, in case they are wrong; of more
samples so much less, as they seldom all are."""


@dataclass(frozen=True)
class Choice:
    """What is computed of the drafts."""

    lengths_B: IntArray
    """The first so many tokens of each draft."""
    gain: float
    """Expected tokens per second against those without drafts, of as many as would give most."""

    @property
    def worth(self) -> float:
        """What that gains, as a share of a step, if it is computed for that."""
        return self.gain - 1.0 if self.gain >= LEAST_GAIN else 0.0


@dataclass(frozen=True)
class Room:
    """What drafts may lose."""

    covered_s: float
    """The largest price that the margin covers."""
    share: float = 1.0
    """The part of it that drafts are expected to cost at most."""
    look_s: float = inf
    """What each later look takes, for whose drafts something should be left; inf: nothing should."""

    @classmethod
    def of(cls, covered_s: float, num_samples: int, look_s: float) -> Self:
        """For so many samples, who are drafted for again and again."""
        return cls(covered_s, share_of(num_samples), look_s)


def least_survival(cost: StepCost, num_samples: int, num_context: int) -> float:
    """Survival below which drafts are not worth looking up: half of what a row costs in tokens, the lesser of the next
    row and the mean of as many as there are samples; `LEAST_SURVIVAL` at least."""
    rows_X = np.array([num_samples, num_samples + 1, 2 * num_samples])
    plain, one_more, twice = cost.seconds(rows_X, num_context).tolist()
    row_s = min(one_more - plain, (twice - plain) / num_samples)
    return max(LEAST_SURVIVAL, 0.5 * min(1.0, row_s * num_samples / max(plain, 1e-12)))


def might_pay(drafts: DraftTokens, plain_s: float, look_s: float) -> bool:
    """Whether all drafts that were found would gain enough for what looking takes, if rows took nothing."""
    share = float(drafts.survival_BK.sum()) / len(drafts.lengths_B)
    return (1.0 + share) * plain_s >= LEAST_GAIN * (plain_s + look_s)


@dataclass(frozen=True)
class Weighed:
    """All drafts of a batch, weighed at once."""

    samples_M: IntArray
    """The sample of each, the likeliest first."""
    allowed_M1: NDArray[np.bool_]
    """Whether the margin covers the first so many."""
    best: Choice
    """The first m of them, of those that are allowed, with the largest (B + S(m)) / T(B + m), or fewer, where something
    should be left; none, where those gain too little."""


def weigh(
    drafts: DraftTokens, seconds_M1: FloatArray, prices_M1: FloatArray, room: Room, *, more_s: float = 0.0
) -> Weighed:
    """Which drafts pay (`draft_choice.choose`).

    Args:
        seconds_M1: of a step with the first 0 … M draft tokens.
        prices_M1: what these drafts may cost at most, if none is accepted.
        more_s: that every step takes beside.
    """
    num_tokens = len(seconds_M1) - 1
    samples_M, allowed_M1 = np.empty(num_tokens, np.int64), np.empty(num_tokens + 1, bool)
    chosen, gain, most_gain = draft_choice.choose(
        drafts.survival_BK,
        drafts.lengths_B,
        seconds_M1,
        prices_M1,
        room.covered_s,
        room.share,
        more_s,
        room.look_s,
        samples_M,
        allowed_M1,
    )
    best = first(samples_M, chosen if gain >= LEAST_GAIN else 0, len(drafts.lengths_B), most_gain)
    return Weighed(samples_M, allowed_M1, best)


def share_of(num_samples: int) -> float:
    """Share of what may be lost that drafts for so many samples may be expected to cost."""
    return 1.0 - HELD_BACK / num_samples


def first(samples_M: IntArray, count: int, num_samples: int, gain: float = 1.0) -> Choice:
    """The first so many of the drafts of these samples."""
    return Choice(np.bincount(samples_M[:count], minlength=num_samples), gain)


def nothing(num_samples: int) -> Choice:
    """No draft at all."""
    return Choice(np.zeros(num_samples, np.int64), 1.0)

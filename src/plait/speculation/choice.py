"""Which guesses of a batch are computed: those that give the most tokens per second. Numbers in, a decision out.

All guessed tokens of the batch compete by their survival, the chance that they come true with all before them. With
the m likeliest of them a step gives B + S(m) tokens, S(m) the sum of their survivals, and takes T(B + m). Survival
falls along a chain, so the m likeliest are beginnings of chains.

How many tokens are *sure* to come is another question: S(m), as far as its parts are known, less SPREADS of its
standard deviations.

Shapes: B samples, K tokens of a guess, M guessed tokens, the likeliest first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.kernels import draft_choice
from plait.speculation.drafter import Guesses
from plait.speculation.pool import FloatArray, IntArray

LEAST_GAIN = 1.04
"""Expected tokens per second against those without guesses, from which on guesses are computed: the estimates err."""
SPREADS = 0.7
"""Standard deviations of a step's tokens that its gain must exceed so as to be sure: with that, the sum of 32 steps is
four of its own above nothing."""


@dataclass(frozen=True)
class Choice:
    """What is computed of the guesses."""

    lengths_B: IntArray
    """The first so many tokens of each guess."""
    gain: float
    """Expected tokens per second against those without guesses, of as many as would give most."""


def sure_at(known_BK: FloatArray) -> FloatArray:
    """[K]: tokens that guesses of so many are sure to come to.

    Args:
        known_BK: survival, as far as it is known.
    """
    sums_BK = known_BK.cumsum(1)
    squares_BK = ((2 * np.arange(known_BK.shape[1]) + 1) * known_BK).cumsum(1)
    spread_K = np.sqrt(np.maximum((squares_BK - sums_BK**2).sum(0), 0.0))
    return np.maximum(sums_BK.sum(0) - SPREADS * spread_K, 0.0)


def staked(prices_X: FloatArray, sure_X: FloatArray) -> FloatArray:
    """[X]: seconds that may be lost by what costs so much and is sure to gain so much in many steps: less than nothing
    where that is more. Where it is not, a single step may lose the whole price."""
    return np.where(sure_X > prices_X, prices_X - sure_X, prices_X)


@dataclass(frozen=True)
class Weighed:
    """All guesses of a batch, weighed at once."""

    samples_M: IntArray
    """The sample of each, the likeliest first."""
    allowed_M1: NDArray[np.bool_]
    """Whether the margin covers the first so many, or they are sure to gain."""
    best: Choice
    """The first m of them, of those that are allowed, with the largest (B + S(m)) / T(B + m); none, where that gains
    too little."""
    least_price_s: float
    """Of any number of them: what they take, less what they are sure to gain."""


def weigh(
    guesses: Guesses, known_S: FloatArray, seconds_M1: FloatArray, *, often: float, room_s: float, more_s: float
) -> Weighed:
    """Which guesses pay (`draft_choice.choose`).

    Args:
        known_S: how much is known of each source.
        seconds_M1: of a step with the first 0 … M guesses.
        often: share of the steps in which there are guesses; of fewer it is less sure what they come to.
        room_s: that the margin covers.
        more_s: that every step takes beside.
    """
    num_tokens = len(seconds_M1) - 1
    samples_M, allowed_M1 = np.empty(num_tokens, np.int64), np.empty(num_tokens + 1, bool)
    best, gain, most_gain, least_price_s = draft_choice.choose(
        guesses.survival_BK,
        guesses.lengths_B,
        guesses.cells_BK,
        known_S,
        seconds_M1,
        SPREADS / math.sqrt(often),
        room_s,
        more_s,
        samples_M,
        allowed_M1,
    )
    chosen = first(samples_M, best if gain >= LEAST_GAIN else 0, len(guesses.lengths_B), most_gain)
    return Weighed(samples_M, allowed_M1, chosen, least_price_s)


def first(samples_M: IntArray, count: int, num_samples: int, gain: float = 1.0) -> Choice:
    """The first so many of the guesses of these samples."""
    return Choice(np.bincount(samples_M[:count], minlength=num_samples), gain)


def nothing(num_samples: int) -> Choice:
    """No guess at all."""
    return Choice(np.zeros(num_samples, np.int64), 1.0)

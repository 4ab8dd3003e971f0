"""Which guesses of a batch are computed: those that give the most tokens per second. Numbers in, a decision out.

All guessed tokens of the batch compete by their survival, the chance that they come true with all before them. With
the m likeliest of them a step gives B + S(m) tokens, S(m) the sum of their survivals, and takes T(B + m). Survival
falls along a chain, so the m likeliest are beginnings of chains.

How many tokens are *sure* to come is another question: S(m), as far as its parts are known, less SPREADS of its
standard deviations.

Shapes: B samples, K tokens of a guess, M guessed tokens, the likeliest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.speculation.pool import FloatArray, IntArray

LEAST_GAIN = 1.04
"""Expected tokens per second against those without guesses, from which on guesses are computed: the estimates err."""
SPREADS = 0.7
"""Standard deviations of a step's tokens that its gain must exceed so as to be sure: with that, the sum of 32 steps is
four of its own above nothing."""


@dataclass(frozen=True)
class Ranked:
    """All guessed tokens of a batch, the likeliest first, of equals those that stand earlier in their guess."""

    samples_M: IntArray
    places_M: IntArray
    """In the guess, from 0."""
    survival_M: FloatArray


@dataclass(frozen=True)
class Choice:
    """What is computed of the guesses."""

    lengths_B: IntArray
    """The first so many tokens of each guess."""
    gain: float
    """Expected tokens per second against those without guesses, of as many as would give most."""


def by_survival(survival_BK: FloatArray, lengths_B: IntArray) -> Ranked:
    """The tokens of guesses that are so long."""
    num_samples, num_tokens = len(lengths_B), int(lengths_B.sum())
    # Behind the end of a guess survival is 0, so the first of all are those that there are.
    order_M = np.argsort(-survival_BK.T.ravel(), kind="stable")[:num_tokens]
    places_M, samples_M = np.divmod(order_M, num_samples)
    return Ranked(samples_M, places_M, survival_BK[samples_M, places_M])


def sure_tokens(ranked: Ranked, known_BK: FloatArray, often: float = 1.0) -> FloatArray:
    """[M + 1]: that the first 0 … M guesses are sure to come to.

    Args:
        known_BK: survival, as far as it is known: less, where little was seen.
        often: share of the steps in which there are guesses; of fewer the sum is less sure.
    """
    known_M = known_BK[ranked.samples_M, ranked.places_M]
    before_M = (known_BK.cumsum(1) - known_BK)[ranked.samples_M, ranked.places_M]
    # Of the tokens a of one guess that come true, E[a²] is the sum of (2 place + 1) survival.
    variance_M = (2 * ranked.places_M + 1) * known_M - known_M * (2 * before_M + known_M)
    spread_M = np.sqrt(np.maximum(variance_M.cumsum(), 0.0))
    return np.concatenate([np.zeros(1), np.maximum(known_M.cumsum() - SPREADS / np.sqrt(often) * spread_M, 0.0)])


def sure_at(known_BK: FloatArray) -> FloatArray:
    """[K]: tokens that guesses of so many are sure to come to, as `sure_tokens` counts them.

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


def most_per_second(
    ranked: Ranked, seconds_M1: FloatArray, num_samples: int, allowed_M1: NDArray[np.bool_] | None = None
) -> Choice:
    """The first m of the guesses with the largest (B + S(m)) / T(B + m); none, where that gains too little.

    Args:
        seconds_M1: of a step with the first 0 … M guesses.
        allowed_M1: of them, so many may be computed; None: any number. None at all always may.
    """
    tokens_M1 = num_samples + np.concatenate([np.zeros(1), np.cumsum(ranked.survival_M)])
    per_second_M1 = tokens_M1 / np.maximum(seconds_M1, 1e-12)
    gains_M1 = per_second_M1 / per_second_M1[0]
    allowed_gains_M1 = gains_M1 if allowed_M1 is None else np.where(allowed_M1, gains_M1, 0.0)
    best = int(allowed_gains_M1.argmax())
    count = best if allowed_gains_M1[best] >= LEAST_GAIN else 0
    return first(ranked, count, num_samples, float(gains_M1.max()))


def first(ranked: Ranked, count: int, num_samples: int, gain: float = 1.0) -> Choice:
    """The first so many of the guesses."""
    return Choice(np.bincount(ranked.samples_M[:count], minlength=num_samples), gain)


def nothing(num_samples: int) -> Choice:
    """No guess at all."""
    return Choice(np.zeros(num_samples, np.int64), 1.0)

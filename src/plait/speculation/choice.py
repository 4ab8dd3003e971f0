"""Which guesses of a batch are computed: those that give the most tokens per second. Numbers in, a decision out.

All guessed tokens of the batch compete by their survival, the chance that they come true with all before them. With
the m likeliest of them a step gives B + S(m) tokens, S(m) the sum of their survivals, and takes T(B + m). Survival
falls along a chain, so the m likeliest are beginnings of chains.

Shapes: B samples, K tokens of a guess, M guessed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.speculation.pool import FloatArray, IntArray

LEAST_GAIN = 1.04
"""Expected tokens per second against those without guesses, from which on guesses are computed: the estimates err."""


@dataclass(frozen=True)
class Choice:
    """What is computed of the guesses."""

    lengths_B: IntArray
    """The first so many tokens of each guess."""
    gain: float
    """Expected tokens per second against those without guesses."""


def by_survival(survival_BK: FloatArray, lengths_B: IntArray) -> tuple[IntArray, FloatArray]:
    """All guessed tokens, the likeliest first, of equals those that stand earlier in their guess: the sample of each
    [M], and its survival [M]."""
    num_samples, most = survival_BK.shape
    depths_KB = np.repeat(np.arange(most)[:, None], num_samples, axis=1)
    there_KB = depths_KB < lengths_B
    samples_M = np.broadcast_to(np.arange(num_samples), there_KB.shape)[there_KB]
    survival_M = survival_BK.T[there_KB]
    order_M = np.argsort(-survival_M, kind="stable")
    return samples_M[order_M], survival_M[order_M]


def most_per_second(samples_M: IntArray, survival_M: FloatArray, seconds_M1: FloatArray, num_samples: int) -> Choice:
    """The first m of the guesses with the largest (B + S(m)) / T(B + m); none, where that gains too little.

    Args:
        samples_M, survival_M: as of `by_survival`.
        seconds_M1: of a step with the first 0 … M guesses.
    """
    tokens_M1 = num_samples + np.concatenate([np.zeros(1), np.cumsum(survival_M)])
    per_second_M1 = tokens_M1 / np.maximum(seconds_M1, 1e-12)
    best = int(per_second_M1.argmax())
    gain = float(per_second_M1[best] / per_second_M1[0])
    return first(samples_M, best, num_samples, gain) if gain >= LEAST_GAIN else nothing(num_samples)


def first(samples_M: IntArray, count: int, num_samples: int, gain: float = 1.0) -> Choice:
    """The first so many of the guesses."""
    return Choice(np.bincount(samples_M[:count], minlength=num_samples), gain)


def nothing(num_samples: int) -> Choice:
    """No guess at all."""
    return Choice(np.zeros(num_samples, np.int64), 1.0)

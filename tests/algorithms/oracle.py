"""The mathematics of GRPO written a second time: float64 scalars, loops over samples and tokens, derivatives by hand.

Arguments are ragged: a list with one list of numbers per sample. Nothing here calls plait.
"""

from __future__ import annotations

import math

Ragged = list[list[float]]


def advantages(rewards: list[float], scale: bool) -> list[float]:
    n = len(rewards)
    mean = sum(rewards) / n
    centred = [r - mean for r in rewards]
    if n == 1 or max(rewards) == min(rewards):
        return [0.0] * n
    std = math.sqrt(sum(c * c for c in centred) / (n - 1))
    return [c / (std + 1e-4) for c in centred] if scale else centred


def kl(d: float, how: str) -> tuple[float, float]:
    """Estimate and its derivative by the policy's log-prob; d = log π − log π_ref."""
    if how == "k1":
        return d, 1.0
    if how == "k2":
        return d * d / 2, d
    if how == "k3":
        return math.exp(-d) - 1 + d, 1 - math.exp(-d)
    raise AssertionError(how)


def surrogate(logp: float, old: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """−min(ρA, clip(ρ)A) and its derivative by logp: −ρA where the unclipped term is the smaller, else 0."""
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    if clipped * advantage < ratio * advantage:
        return -clipped * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def weights(lengths: list[int], how: str, limit: int) -> list[float]:
    """What one token of each sample counts in the aggregate; samples without tokens are no part of any denominator."""
    sequences = sum(length > 0 for length in lengths)
    if how == "token-mean":
        return [1 / sum(lengths)] * len(lengths)
    if how == "seq-mean-token-mean":
        return [1 / (sequences * length) if length else 0.0 for length in lengths]
    if how == "seq-mean-token-sum-norm":
        return [1 / (sequences * limit)] * len(lengths)
    raise AssertionError(how)


def grpo(
    logprobs: Ragged,
    old: Ragged,
    ref: Ragged | None,
    advantage: list[float],
    *,
    low: float,
    high: float,
    kl_coef: float,
    estimator: str,
    aggregation: str,
    limit: int,
) -> tuple[float, Ragged]:
    """The loss of a whole mini-batch and its derivative by every log-prob."""
    loss, gradient = 0.0, []
    for i, weight in enumerate(weights([len(tokens) for tokens in logprobs], aggregation, limit)):
        gradient.append([])
        for t, logp in enumerate(logprobs[i]):
            value, slope = surrogate(logp, old[i][t], advantage[i], low, high)
            if ref is not None:
                penalty, penalty_slope = kl(logp - ref[i][t], estimator)
                value += kl_coef * penalty
                slope += kl_coef * penalty_slope
            loss += weight * value
            gradient[-1].append(weight * slope)
    return loss, gradient

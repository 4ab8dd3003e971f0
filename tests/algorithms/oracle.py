"""The mathematics of policy gradients written a second time: float64 scalars, loops, derivatives by hand.

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


def policy_loss(
    logprobs: Ragged,
    old: Ragged,
    ref: Ragged | None,
    advantage: Ragged,
    *,
    low: float,
    high: float,
    kl_coef: float,
    estimator: str,
    aggregation: str,
    limit: int,
    ratio: str = "token",
) -> tuple[float, Ragged]:
    """The loss of a whole mini-batch and its derivative by every log-prob. `advantage` has one number per token."""
    loss, gradient = 0.0, []
    for i, weight in enumerate(weights([len(tokens) for tokens in logprobs], aggregation, limit)):
        length = len(logprobs[i])
        slopes = [0.0] * length
        log_ratios = [logprobs[i][t] - old[i][t] for t in range(length)]
        for t in range(length):
            # The log-ratio of token t, and what each token of the response contributes to it.
            if ratio == "token":
                log_ratio, share = log_ratios[t], [float(u == t) for u in range(length)]
            elif ratio == "sequence-mean":
                log_ratio, share = sum(log_ratios) / length, [1 / length] * length
            else:
                log_ratio, share = sum(log_ratios), [1.0] * length
            value, slope = surrogate(log_ratio, 0.0, advantage[i][t], low, high)
            loss += weight * value
            for u in range(length):
                slopes[u] += weight * slope * share[u]
            if ref is not None:
                penalty, penalty_slope = kl(logprobs[i][t] - ref[i][t], estimator)
                times = length if ratio == "sequence-product" else 1  # summed over the response, then at each token
                loss += weight * kl_coef * penalty * times
                slopes[t] += weight * kl_coef * penalty_slope * times
        gradient.append(slopes)
    return loss, gradient


def leave_one_out(rewards: list[float]) -> list[float]:
    out = []
    for i, r in enumerate(rewards):
        others = [x for j, x in enumerate(rewards) if j != i]
        out.append(r - sum(others) / len(others) if others else 0.0)
    return out


def token_returns(score: float, logprobs: list[float], ref: list[float], coef: float, how: str) -> list[float]:
    """Token rewards −coef · kl_t, the score added to the last; the return of a token is what comes from it on."""
    rewards = [-coef * kl(p - q, how)[0] for p, q in zip(logprobs, ref, strict=True)]
    if rewards:
        rewards[-1] += score
    return [sum(rewards[t:]) for t in range(len(rewards))]


def whiten(returns: Ragged) -> Ragged:
    """Over all tokens of the batch; verl's masked_whiten divides by sqrt(var + 1e-8), the same to rounding."""
    flat = [x for sample in returns for x in sample]
    if len(flat) < 2 or max(flat) == min(flat):
        return [[0.0] * len(sample) for sample in returns]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((x - mean) ** 2 for x in flat) / (len(flat) - 1))
    return [[(x - mean) / (std + 1e-8) for x in sample] for sample in returns]


def overlong(length: int, limit: int, buffer: int, penalty: float) -> float:
    """DAPO, eq. 13, in the lengths of the paper (R_length, times `penalty`)."""
    if length <= limit - buffer:
        return 0.0
    return penalty * ((limit - buffer) - length) / buffer


def grpo(
    logprobs: Ragged, old: Ragged, ref: Ragged | None, advantage: list[float], **settings: float | str
) -> tuple[float, Ragged]:
    """`policy_loss` with one advantage per sample."""
    spread = [[a] * len(tokens) for a, tokens in zip(advantage, logprobs, strict=True)]
    return policy_loss(logprobs, old, ref, spread, **settings)

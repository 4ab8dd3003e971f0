"""The mathematics of policy gradients written a second time: float64 scalars, loops, derivatives by hand.

Arguments are ragged: a list with one list of numbers per sample. Nothing here calls plait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Ragged = list[list[float]]


def advantages(rewards: list[float], scale: bool) -> list[float]:
    n = len(rewards)
    mean = sum(rewards) / n
    centred = [r - mean for r in rewards]
    if n == 1 or max(rewards) == min(rewards):
        return [0.0] * n
    std = math.sqrt(sum(c * c for c in centred) / (n - 1))
    return [c / (std + 1e-4) for c in centred] if scale else centred


def decoupled(scores: list[list[float | None]], weights: list[float]) -> list[float]:
    """Scores of a group by reward; None where it does not apply."""
    sums = [0.0] * len(scores[0])
    for of_reward, weight in zip(scores, weights, strict=True):
        found = iter(advantages([r for r in of_reward if r is not None] or [0.0], True))
        for i, r in enumerate(of_reward):
            sums[i] += 0.0 if r is None else weight * next(found)
    return sums


def kl(d: float, how: str) -> tuple[float, float]:
    """Estimate and its derivative by the policy's log-prob; d = log π − log π_ref."""
    if how == "k1":
        return d, 1.0
    if how == "k2":
        return d * d / 2, d
    if how == "k3":
        return math.exp(-d) - 1 + d, 1 - math.exp(-d)
    raise AssertionError(how)


def surrogate(
    logp: float, old: float, advantage: float, low: float, high: float, dual: float | None = None
) -> tuple[float, float]:
    """−min(ρA, clip(ρ)A) and its derivative by logp: −ρA where the unclipped term is the smaller, else 0.

    With a dual clip the loss of a negative advantage is at most −dual · A, and flat there.
    """
    ratio = math.exp(logp - old)
    clipped = min(max(ratio, 1 - low), 1 + high)
    if dual is not None and advantage < 0 and -max(ratio, clipped) * advantage > -dual * advantage:
        return -dual * advantage, 0.0
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
    dual: float | None = None,
    weigh_kl: bool = False,
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
            value, slope = surrogate(log_ratio, 0.0, advantage[i][t], low, high, dual)
            loss += weight * value
            for u in range(length):
                slopes[u] += weight * slope * share[u]
            if ref is not None:
                penalty, penalty_slope = kl(logprobs[i][t] - ref[i][t], estimator)
                times = length if ratio == "sequence-product" else 1  # summed over the response, then at each token
                rho = math.exp(log_ratio) if weigh_kl else 1.0
                loss += weight * kl_coef * penalty * times * rho
                slopes[t] += weight * kl_coef * penalty_slope * times * rho
                if weigh_kl:  # d(ρ kl) = ρ dkl + kl dρ, and dρ = ρ · what each token contributes to log ρ
                    for u in range(length):
                        slopes[u] += weight * kl_coef * penalty * times * rho * share[u]
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


def entropy_bonus(entropies: Ragged, coef: float, aggregation: str, limit: int) -> tuple[float, Ragged]:
    """What the bonus adds to the loss of a mini-batch, and the derivative by every entropy."""
    each = weights([len(tokens) for tokens in entropies], aggregation, limit)
    loss = -coef * sum(weight * sum(tokens) for weight, tokens in zip(each, entropies, strict=True))
    return loss, [[-coef * weight] * len(tokens) for weight, tokens in zip(each, entropies, strict=True)]


def grpo(
    logprobs: Ragged, old: Ragged, ref: Ragged | None, advantage: list[float], **settings: float | str
) -> tuple[float, Ragged]:
    """`policy_loss` with one advantage per sample."""
    spread = [[a] * len(tokens) for a, tokens in zip(advantage, logprobs, strict=True)]
    return policy_loss(logprobs, old, ref, spread, **settings)


def gae(rewards: list[float], values: list[float], after: float, gamma: float, lam: float) -> list[float]:
    """The sum of the definition, one power at a time."""
    n = len(rewards)
    following = [*values[1:], after]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]


def monte_carlo(rewards: list[float], after: float, gamma: float) -> list[float]:
    """Discounted returns from each token on, and what follows the last one."""
    n = len(rewards)
    return [sum(gamma ** (u - t) * rewards[u] for u in range(t, n)) + gamma ** (n - t) * after for t in range(n)]


def explained_variance(returns: list[float], values: list[float]) -> float:
    def variance(numbers: list[float]) -> float:
        mean = sum(numbers) / len(numbers)
        return sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)

    return 1 - variance([g - v for g, v in zip(returns, values, strict=True)]) / (variance(returns) + 1e-5)


def value_loss(
    values: list[float], old: list[float], returns: list[float], mask: list[float], clip: float | None
) -> tuple[float, list[float], float]:
    """The loss of a mini-batch, its derivative by every value, and the share of tokens where the clip decides."""
    count = sum(mask)
    loss, slopes, clips = 0.0, [], 0
    for v, o, g, m in zip(values, old, returns, mask, strict=True):
        near = v if clip is None else min(max(v, o - clip), o + clip)
        plain, clipped = (v - g) ** 2, (near - g) ** 2
        flat = clipped > plain
        clips += flat and m > 0
        loss += m * max(plain, clipped) / 2 / count
        slopes.append(0.0 if flat else m * (v - g) / count)
    return loss, slopes, clips / count


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def bradley_terry(chosen: float, rejected: float, margin: float, centre: float) -> tuple[float, float, float]:
    """The loss of a pair and its derivatives by both scores."""
    wrong = sigmoid(-(chosen - rejected - margin))
    pull = 2 * centre * (chosen + rejected)
    return -log_sigmoid(chosen - rejected - margin) + centre * (chosen + rejected) ** 2, pull - wrong, pull + wrong


def kto(ratio: float, is_desirable: bool, z0: float, beta: float, weights: tuple[float, float]) -> tuple[float, float]:
    """The loss of a response from its log-ratio, and its derivative by it; weights of desirable and undesirable."""
    if is_desirable:
        value = sigmoid(beta * (ratio - z0))
        return weights[0] * (1 - value), -weights[0] * beta * value * (1 - value)
    value = sigmoid(beta * (z0 - ratio))
    return weights[1] * (1 - value), weights[1] * beta * value * (1 - value)


def divergence(policy: Sequence[float], teacher: Sequence[float], beta: float) -> tuple[float, list[float]]:
    """Generalised Jensen-Shannon divergence of a token from log-probs, and its derivatives by those of the policy, each
    by itself."""
    value, slopes = 0.0, []
    for own, its in zip(policy, teacher, strict=True):
        p, q = math.exp(own), math.exp(its)
        if beta == 0:
            value += q * (its - own)
            slopes.append(-q)
        elif beta == 1:
            value += p * (own - its)
            slopes.append(p * (own - its + 1))
        else:
            m, moved = beta * q + (1 - beta) * p, (1 - beta) * p
            value += beta * q * (its - math.log(m)) + (1 - beta) * p * (own - math.log(m))
            slopes.append(-beta * q * moved / m + (1 - beta) * p * (own - math.log(m) + 1 - moved / m))
    return value, slopes


def dpo(
    chosen: float,
    rejected: float,
    tokens: tuple[int, int],
    how: str,
    beta: float,
    smoothing: float = 0.0,
    margin: float = 0.0,
) -> tuple[float, float, float]:
    """The loss of a pair from both log-ratios, and its derivatives by them."""
    if how in ("sigmoid_norm", "ipo", "orpo"):
        loss, by_chosen, by_rejected = _dpo(chosen / tokens[0], rejected / tokens[1], how, beta, smoothing, margin)
        return loss, by_chosen / tokens[0], by_rejected / tokens[1]
    return _dpo(chosen, rejected, how, beta, smoothing, margin)


def _dpo(c: float, r: float, how: str, beta: float, smoothing: float, margin: float) -> tuple[float, float, float]:
    h, x, y = beta * (c - r) - margin, beta * c, beta * r
    if how == "hinge":
        return max(0.0, 1 - h), -beta * (h < 1), beta * (h < 1)
    if how == "ipo":
        gap = c - r - 1 / (2 * beta)
        return gap**2, 2 * gap, -2 * gap
    if how == "sppo_hard":
        up, down = c - 1 / (2 * beta), r + 1 / (2 * beta)
        return up**2 + down**2, 2 * up, 2 * down
    if how == "exo_pair":
        p, q = sigmoid(h), sigmoid(-h)
        loss = p * math.log(p / (1 - smoothing)) + q * math.log(q / smoothing)
        slope = beta * p * q * (math.log(p / (1 - smoothing)) - math.log(q / smoothing))
        return loss, slope, -slope
    if how == "nca_pair":
        loss = -log_sigmoid(x) - log_sigmoid(-x) / 2 - log_sigmoid(-y) / 2
        return loss, beta * (sigmoid(x) / 2 - sigmoid(-x)), beta * sigmoid(y) / 2
    if how == "bco_pair":
        return -log_sigmoid(x) - log_sigmoid(-y), -beta * sigmoid(-x), beta * sigmoid(y)
    if how == "apo_zero":
        return 1 - sigmoid(x) + sigmoid(y), -beta * sigmoid(x) * sigmoid(-x), beta * sigmoid(y) * sigmoid(-y)
    if how == "apo_down":
        gap = beta * sigmoid(h) * sigmoid(-h)
        return sigmoid(x) + 1 - sigmoid(h), beta * sigmoid(x) * sigmoid(-x) - gap, gap
    if how == "orpo":
        p, q = math.exp(c), math.exp(r)
        odds = math.log(p / (1 - p)) - math.log(q / (1 - q))
        slope = beta * sigmoid(-odds)
        return -beta * log_sigmoid(odds), -slope / (1 - p), slope / (1 - q)
    right, wrong, scale = 1 - smoothing, smoothing, 1.0
    if how == "robust":
        wrong, scale = -smoothing, 1 / (1 - 2 * smoothing)
    loss = -right * log_sigmoid(h) - wrong * log_sigmoid(-h)
    slope = beta * (-right * sigmoid(-h) + wrong * sigmoid(h))
    return scale * loss, scale * slope, -scale * slope

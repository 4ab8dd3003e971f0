"""What advantages are made of. NumPy float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

FloatArray = np.ndarray[Any, np.dtype[np.float64]]

EPSILON = 1e-4
"""Added to standard deviations of rewards, as in the published code."""


def standardised(values: FloatArray, epsilon: float) -> FloatArray:
    """(x − mean x) / (std x + ε), the sample standard deviation (ddof 1).

    Exactly 0 for a single value and for equal ones: a mean of equal numbers may differ from them in the last bit.
    """
    if len(values) < 2 or np.ptp(values) == 0:
        return np.zeros_like(values)
    return (values - values.mean()) / (values.std(ddof=1) + epsilon)


def centred(values: FloatArray) -> FloatArray:
    """x − mean x; exactly 0 for a single value and for equal ones."""
    return np.zeros_like(values) if np.ptp(values) == 0 else values - values.mean()


def decoupled(scores: FloatArray, weights: FloatArray) -> FloatArray:
    """Σ_k weight_k · (r_k − mean r_k) / (std r_k + 1e-4), the mean and the sample standard deviation (ddof 1) of each
    reward over the group (Liu et al. 2026, GDPO, arXiv 2601.05242; `normalize_then_sum` of TRL): rewards of unlike
    spread count alike, and different combinations of rewards do not become one advantage.

    Args:
        scores: [rewards, samples] of a group; NaN where a reward does not apply to a sample, which is then neither in
            its mean nor in the sample's sum.
        weights: [rewards].

    Returns:
        [samples].
    """
    sums = np.zeros(scores.shape[1])
    for values, weight in zip(scores, weights, strict=True):
        applies = np.isfinite(values)
        sums[applies] += weight * standardised(values[applies], EPSILON)
    return sums


def whitened(returns: Sequence[FloatArray]) -> list[FloatArray]:
    """A_t = (G_t − mean G) / (std G + 1e-8) over all response tokens of the batch, whatever sample they belong to.

    One array per sample in and out. All are 0 where every return is the same.
    """
    return _parts(standardised(_flat(returns), 1e-8), returns)


def scaled(rewards: Sequence[FloatArray]) -> list[FloatArray]:
    """(r − mean r) / (std r + 1e-8) + mean r over all tokens of the batch, as `whiten_rewards` of TRL: the mean stays.

    One array per sample in and out. Unchanged where every reward is the same.
    """
    rewards_R = _flat(rewards)
    if len(rewards_R) > 1 and np.ptp(rewards_R) > 0:
        rewards_R = standardised(rewards_R, 1e-8) + rewards_R.mean()
    return _parts(rewards_R, rewards)


def gae(rewards: FloatArray, values: FloatArray, value_after: float = 0.0, *, gamma: float, lam: float) -> FloatArray:
    """Generalised advantage estimation over the tokens of one response (Schulman et al. 2016, arXiv 1506.02438, §3).

    A_t = Σ_{l ≥ 0} (γλ)^l δ_{t+l} with δ_t = r_t + γ V_{t+1} − V_t, where V_t is the value of the state before token t.

    Args:
        rewards: [tokens], of each token.
        values: [tokens].
        value_after: of the state after the last token; 0 where the response ended.
    """
    deltas = rewards + gamma * np.append(values[1:], value_after) - values if len(values) else np.zeros(0)
    advantages = np.empty_like(deltas)
    following = 0.0
    for t in range(len(deltas) - 1, -1, -1):
        following = deltas[t] + gamma * lam * following
        advantages[t] = following
    return advantages


def explained_variance(returns: Sequence[FloatArray], values: Sequence[FloatArray]) -> float:
    """1 − Var(G − V) / (Var G + 1e-5) over all tokens of the batch, as verl counts `critic/vf_explained_var`.

    1 for a critic that knows the returns, 0 for one that says the same everywhere; 0 for less than two tokens.
    """
    returns_R, values_R = _flat(returns), _flat(values)
    if len(returns_R) < 2:
        return 0.0
    return float(1 - (returns_R - values_R).var(ddof=1) / (returns_R.var(ddof=1) + 1e-5))


def token_mean(values: Sequence[FloatArray]) -> float:
    """Over all tokens of the batch; 0 for none."""
    values_R = _flat(values)
    return float(values_R.mean()) if len(values_R) else 0.0


def _flat(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.zeros(0), *parts])


def _parts(values_R: FloatArray, like: Sequence[FloatArray]) -> list[FloatArray]:
    """One array per sample again."""
    ends = np.cumsum([len(values) for values in like], dtype=np.int64)
    return [values_R[end - len(values) : end] for values, end in zip(like, ends, strict=True)]

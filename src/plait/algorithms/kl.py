"""The KL to a reference policy: which log-probs a flow needs for it, and the KL taken off the reward (NumPy float64).

KL in the reward and KL in the loss are different algorithms. In the reward it reaches the policy as part of the
return, and k1 = log π − log π_ref is unbiased. In the loss it is differentiated: the gradient of k1 averages to 0, that
of k2 is the gradient of KL(π ‖ π_ref), that of k3 the gradient of KL(π_ref ‖ π).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from plait.algorithms.advantages import FloatArray
from plait.algorithms.losses import KLEstimator, kl_estimate
from plait.dataflow import Role, Samples
from plait.dataflow.handles import ColumnHandle
from plait.errors import FlowError


class KLPlace(StrEnum):
    LOSS = "loss"
    REWARD = "reward"


@dataclass(frozen=True)
class PolicyLogprobs:
    """The log-prob columns of one flow; a column that the flow can do without is None and never computed."""

    ref: ColumnHandle | None
    """Of the reference, where there is a KL."""
    in_reward: tuple[ColumnHandle, ColumnHandle] | None
    """Of the policy that the batch begins with and of the reference, where the KL is in the reward."""
    old: ColumnHandle | None
    """Of the policy that the batch begins with, for the loss, where the batch is used more than once. Used once, it is
    on-policy, and the old log-probs are the new ones."""


def policy_logprobs(
    actor: Role, ref: Role | None, samples: Samples, *, kl_coef: float, kl_in: KLPlace, updates: int
) -> PolicyLogprobs:
    """Ask for the log-probs that a flow needs.

    Args:
        updates: optimizer steps per batch.

    Raises:
        FlowError: `kl_coef` > 0 and nothing fills the role `ref`.
    """
    ref_logprobs = None
    if kl_coef > 0:
        if ref is None:
            raise FlowError(
                "kl_coef > 0 needs the role `ref`, which nothing fills; set options.kl_coef to 0 or give a reference"
            )
        ref_logprobs = ref.logprobs(samples)
    if ref_logprobs is not None and kl_in is KLPlace.REWARD:
        start = actor.logprobs(samples)
        return PolicyLogprobs(ref_logprobs, (start, ref_logprobs), start if updates > 1 else None)
    return PolicyLogprobs(ref_logprobs, None, actor.logprobs(samples) if updates > 1 else None)


def check_kl_gradient(kl_in: KLPlace, estimator: KLEstimator) -> None:
    """Raises ValueError for k1 in the loss, a penalty that would do nothing."""
    if kl_in is KLPlace.LOSS and estimator is KLEstimator.K1:
        raise ValueError(
            "kl_in: loss with kl_estimator: k1 has no effect, as the gradient of k1 averages to 0; "
            "set `options.kl_estimator` to k2 (the gradient of the KL) or k3, or `options.kl_in` to reward"
        )


def subtract_kl(
    score: float, logprobs: FloatArray, ref_logprobs: FloatArray, kl_coef: float, estimator: KLEstimator
) -> float:
    """KL in the reward of a response: score − kl_coef · Σ_t kl_t."""
    return score - kl_coef * float(kl_estimate(logprobs, ref_logprobs, estimator).sum())


def reward_to_go(
    score: float, logprobs: FloatArray, ref_logprobs: FloatArray, kl_coef: float, estimator: KLEstimator
) -> FloatArray:
    """KL in the reward of each token: G_t = score − kl_coef · Σ_{i ≥ t} kl_i, the undiscounted return from token t on.

    The score is that of the whole response, given at its last token. [tokens] → [tokens].
    """
    kl = kl_estimate(logprobs, ref_logprobs, estimator)
    return score - kl_coef * np.cumsum(kl[::-1])[::-1]

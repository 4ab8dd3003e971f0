"""The KL to a reference policy taken off the reward, and the controller of its weight (NumPy float64).

KL in the reward and KL in the loss are different algorithms. In the reward it reaches the policy as part of the
return, and k1 = log π − log π_ref is unbiased. In the loss it is differentiated: the gradient of k1 averages to 0, that
of k2 is the gradient of KL(π ‖ π_ref), that of k3 the gradient of KL(π_ref ‖ π).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

import numpy as np

from plait.algorithms.advantages import FloatArray
from plait.algorithms.losses import KLEstimator, kl_estimate

MOST_HORIZONS = 10
"""Horizons that one batch counts as, at most: the weight grows by at most 1.2^10, about 6, in a step."""
KL_COEFS = (1e-30, 1e30)
"""What an adapted weight is kept within: float32, in which losses may be, holds it and what it is multiplied by."""


class KLPlace(StrEnum):
    LOSS = "loss"
    REWARD = "reward"


@dataclass(frozen=True)
class KLController:
    """The KL of a response that the weight of the KL steers to, see `adapted_kl_coef`."""

    target: float
    horizon: int


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


def mean_kl(logprobs: Sequence[FloatArray], ref_logprobs: Sequence[FloatArray], estimator: KLEstimator) -> float:
    """KL to the reference of a whole response, Σ_t kl_t in nats, averaged over the responses of the batch."""
    sums = [float(kl_estimate(p, q, estimator).sum()) for p, q in zip(logprobs, ref_logprobs, strict=True)]
    return fmean(sums) if sums else 0.0


def adapted_kl_coef(
    kl_coef: float, measured: float, responses: Sequence[FloatArray], *, target: float, horizon: int
) -> float:
    """The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, §2.2): the weight of the next step.

    β' = β (1 + e · n / horizon) with e = clip(KL / target − 1, −0.2, 0.2) and n responses in the batch; their K_β is
    n / horizon. A batch of more than `horizon` responses counts as n / horizon batches of so many, at most
    `MOST_HORIZONS`: it is one measurement. The weight stays within `KL_COEFS`, and so finite and above 0.

    Args:
        measured: KL of a whole response in nats, as `mean_kl`; `target` likewise.
        responses: any column of the batch, for n.
    """
    error = float(np.clip(measured / target - 1, -0.2, 0.2))
    count = len(responses)
    adapted = kl_coef * (1 + error * min(count, horizon) / horizon) ** min(max(1.0, count / horizon), MOST_HORIZONS)
    return float(np.clip(adapted, *KL_COEFS))

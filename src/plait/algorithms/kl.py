"""The KL to a reference policy taken off the reward, and the controller of its weight (NumPy float64).

KL in the reward and KL in the loss are different algorithms. In the reward it reaches the policy as part of the
return, and k1 = log π − log π_ref is unbiased. In the loss it is differentiated: the gradient of k1 averages to 0, that
of k2 is the gradient of KL(π ‖ π_ref), that of k3 the gradient of KL(π_ref ‖ π).
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from plait.algorithms.advantages import FloatArray
from plait.algorithms.losses import KLEstimator, kl_estimate


class KLPlace(StrEnum):
    LOSS = "loss"
    REWARD = "reward"


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

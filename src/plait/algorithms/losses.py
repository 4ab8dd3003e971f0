"""What losses are made of: the batch that a loss sees, aggregation, clipping, and KL estimators.

Shapes: R response tokens of a micro-batch (or of whatever a loss is given). Tensors come in; torch is not imported.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol

Tensor = Any
"""A torch tensor; this floor does not import torch."""


class Aggregation(StrEnum):
    """How per-token losses become one number. Denominators are those of the whole mini-batch (optimizer step),
    whatever the micro-batches, the ranks and the packing: the gradient does not depend on how work is split."""

    TOKEN_MEAN = "token-mean"
    """Σ over tokens / tokens of the mini-batch (DAPO)."""
    SEQUENCE_MEAN = "seq-mean-token-mean"
    """Mean over samples of each sample's token mean (GRPO)."""
    CONSTANT = "seq-mean-token-sum-norm"
    """Mean over samples of the token sum / the response limit, a constant (Dr. GRPO)."""


class KLEstimator(StrEnum):
    """Per-token estimates of KL(policy ‖ reference) from samples of the policy (Schulman 2020). With
    d = log π − log π_ref: k1 = d, k2 = d²/2, k3 = exp(−d) − 1 + d."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


class LossBatch(Protocol):
    """What a loss sees of one micro-batch. Its return value is this micro-batch's share of the mini-batch loss."""

    logprobs: Tensor
    """[R] float32 (float64 in float64 runs), differentiable: under the trained weights, at the sampling temperature."""
    entropies: Tensor
    """[R], differentiable: of the same distributions, nats."""
    sampling_logprobs: Tensor
    """[R], constant: what the sampling engine recorded."""

    def aggregate(self, values_R: Tensor, how: Aggregation | str) -> Tensor:
        """This micro-batch's share of the aggregate over the mini-batch; shares of all micro-batches add up to it."""
        ...

    def log(self, name: str, values_R: Tensor) -> None:
        """Record the mean of `values_R` over the tokens of the mini-batch as metric `name`."""
        ...


def kl_estimate(logprobs_R: Tensor, ref_logprobs_R: Tensor, how: KLEstimator | str, clamp: float = 20.0) -> Tensor:
    """Per-token KL estimate [R]. The log-ratio is clamped to ±`clamp`, so that one token cannot overflow exp."""
    difference_R = (logprobs_R - ref_logprobs_R).clamp(-clamp, clamp)
    match KLEstimator(how):
        case KLEstimator.K1:
            return difference_R
        case KLEstimator.K2:
            return difference_R**2 / 2
        case KLEstimator.K3:
            return (-difference_R).exp() - 1 + difference_R


def clipped_policy_loss(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped surrogate per token (Schulman et al. 2017, eq. 7), with separate bounds (DAPO, eq. 10).

    Returns:
        loss [R] = −min(ρ A, clip(ρ, 1−clip_low, 1+clip_high) A), ρ [R], and whether each token is clipped [R] (float).
    """
    ratio_R = (logprobs_R - old_logprobs_R).clamp(-20.0, 20.0).exp()
    plain_R = ratio_R * advantages_R
    clipped_R = ratio_R.clamp(1 - clip_low, 1 + clip_high) * advantages_R
    return -plain_R.minimum(clipped_R), ratio_R, (clipped_R < plain_R).to(plain_R.dtype)

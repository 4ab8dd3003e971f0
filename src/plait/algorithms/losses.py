"""What losses are made of: the batch that a loss sees, aggregation, KL estimators, the policy loss, the cross entropy.

Shapes: R response tokens of a micro-batch (or of whatever a loss is given). Tensors come in; torch is not imported.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from plait.algorithms.correction import Corrected, off_policy_kept
from plait.algorithms.surrogates import CLIPPED, MOST_LOG_RATIO, Ratio, Surrogate

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
    """What a loss sees of one micro-batch: R response tokens of N samples. Its return value is this micro-batch's share
    of the mini-batch loss. Means, sums and counts are over what the mask keeps."""

    @property
    def logprobs(self) -> Tensor:
        """[R] float32 (float64 in float64 runs), differentiable: under the trained weights, at the sampling
        temperature. A language model's; reading it for a scalar role is an error, as `values` for a language model."""
        ...

    @property
    def entropies(self) -> Tensor:
        """[R], differentiable: of the same distributions, nats."""
        ...

    @property
    def likeliest(self) -> Tensor:
        """[R], constant: 1.0 where no token is likelier than the one that stands there, else 0.0. For metrics."""
        ...

    def logprobs_at(self, ids_RK: Tensor) -> Tensor:
        """[R, K + 1], differentiable: log-probs of these K tokens of the vocabulary in the place of each response
        token, and last that of all others together, so that they are a distribution. The ids may be of any dtype."""
        ...

    @property
    def values(self) -> Tensor:
        """[R], differentiable: a scalar model's value of the state before each response token."""
        ...

    @property
    def scores(self) -> Tensor:
        """[N], differentiable: a scalar model's output at the last token of each sample."""
        ...

    sampling_logprobs: Tensor
    """[R], constant: what the sampling engine recorded; NaN for given completions."""
    mask: Tensor
    """[R], constant: 1.0 where a token is trained, else 0.0."""

    def aggregate(self, values_R: Tensor, how: Aggregation | str) -> Tensor:
        """A scalar: this micro-batch's share of the aggregate over the mini-batch. Shares of all micro-batches add up
        to it."""
        ...

    def sequence_sum(self, values_R: Tensor) -> Tensor:
        """[R]: for each token the sum of `values_R` over its response. A response is never split over micro-batches."""
        ...

    def per_sequence(self, values_R: Tensor) -> Tensor:
        """[N]: the sum of `values_R` over the tokens of each sample."""
        ...

    def pairs(self, values_N: Tensor) -> tuple[Tensor, Tensor]:
        """[P], [P]: values of the chosen (sample 0) and of the rejected (sample 1) response of each prompt."""
        ...

    def mean_over_sequences(self, values_N: Tensor) -> Tensor:
        """A scalar: this micro-batch's share of the mean over the samples of the mini-batch."""
        ...

    def mean_over_pairs(self, values_P: Tensor) -> Tensor:
        """A scalar: this micro-batch's share of the mean over the pairs of the mini-batch."""
        ...

    def log(self, name: str, values: Tensor, per: str = "token") -> None:
        """Record the mean of `values` over the mini-batch as metric `name`: [R] per token, [N] per sequence, [P] per
        pair."""
        ...


def of_samples(batch: LossBatch, values_R: Tensor) -> Tensor:
    """[N]: of a column with one number per sample, which stands at every token of it, that number."""
    return batch.per_sequence(values_R) / batch.per_sequence(batch.mask).clamp(min=1)


TIE = 1e-6
"""Two numbers that differ by less than this share of their size count as equal: what is left may be rounding, which
depends on where and in which order they were computed."""


def is_higher(above_P: Tensor, below_P: Tensor, sizes_P: Tensor) -> Tensor:
    """[P]: 1 where a number is higher than the other by more than rounding, else 0: a tie does not count.

    Args:
        sizes_P: of the numbers that both were computed from.
    """
    return (above_P - below_P > TIE * sizes_P).to(above_P.dtype)


def minus_log_sigmoid(logits: Tensor) -> Tensor:
    """−log σ(x) = log(1 + exp(−x)), without overflow: elementwise, of any shape and float dtype."""
    return logits.new_zeros(logits.shape).logaddexp(-logits)


def kl_estimate(logprobs_R: Tensor, ref_logprobs_R: Tensor, how: KLEstimator | str) -> Tensor:
    """Per-token KL estimate [R], of tensors or of NumPy arrays.

    The log-ratio is clamped to ±`MOST_LOG_RATIO`, so that one token cannot overflow exp.
    """
    difference_R = (logprobs_R - ref_logprobs_R).clip(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    match KLEstimator(how):
        case KLEstimator.K1:
            return difference_R
        case KLEstimator.K2:
            return difference_R**2 / 2
        case KLEstimator.K3:
            exp = np.exp if isinstance(difference_R, np.ndarray) else type(difference_R).exp
            return exp(-difference_R) - 1 + difference_R


def policy_loss(
    batch: LossBatch,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_coef: Tensor | float = 0.0,
    *,
    surrogate: Surrogate = CLIPPED,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
    kl_estimator: KLEstimator = KLEstimator.K3,
    weigh_kl: bool = False,
    entropy_coef: float = 0.0,
    correction: Corrected | None = None,
    off_policy_mask_threshold: float | None = None,
) -> Tensor:
    """Aggregate of a surrogate, by default the clipped one, plus kl_coef · KL to the reference less entropy_coef ·
    entropy; logs what is watched of them.

    On the first use of a batch (no old log-probs) ρ is 1 and the gradient is that of −A log π: plain REINFORCE.

    Args:
        advantages: [R].
        old_logprobs: [R], of the policy that the batch began with, or was drawn with; None: the new ones.
        ref_logprobs: [R], of the reference; the metric `kl` needs them even where `kl_coef` is 0.
        kl_coef: weight of the KL in the loss; a scalar tensor where it changes from step to step.
        weigh_kl: multiply the KL by ρ, which is differentiated too: E_old[ρ kl] = E_π[kl] for samples of the old
            policy, whose gradient is that of KL(π ‖ π_ref) with k1 and k3 (DeepSeek-V3.2, arXiv 2512.02556).
        entropy_coef: weight of the entropy [R] of the distributions that tokens are drawn from; 0 costs nothing.
        correction: multiplies the surrogate, and a KL that is weighed, by a constant for samples of other weights than
            the old policy's; denominators count all tokens. None: they are the old policy's.
        off_policy_mask_threshold: see `off_policy_kept`; what it leaves out still counts in denominators, and has its
            KL and entropy. None: nothing is left out.
    """
    old_R = batch.logprobs.detach() if old_logprobs is None else old_logprobs
    loss_R, ratio_R = surrogate.losses(batch, advantages, old_R)
    if correction is not None:
        weights_R = correction.weights(batch, old_R)
        loss_R, ratio_R = loss_R * weights_R, ratio_R * weights_R
    if off_policy_mask_threshold is not None:
        loss_R = loss_R * off_policy_kept(batch, advantages, off_policy_mask_threshold)
    batch.log("actor/pg_loss", loss_R)
    batch.log("actor/ppo_kl", kl_estimate(old_R, batch.logprobs.detach(), KLEstimator.K3))
    if ref_logprobs is not None:
        batch.log("kl", kl_estimate(batch.logprobs.detach(), ref_logprobs, KLEstimator.K3))
        if kl_coef > 0:
            kl_R = kl_estimate(batch.logprobs, ref_logprobs, kl_estimator)
            kl_R = batch.sequence_sum(kl_R) if surrogate.ratio is Ratio.SEQUENCE_PRODUCT else kl_R
            loss_R = loss_R + kl_coef * (kl_R * ratio_R if weigh_kl else kl_R)
    if entropy_coef > 0:
        loss_R = loss_R - entropy_coef * batch.entropies
    return batch.aggregate(loss_R, aggregation)


def cross_entropy(
    batch: LossBatch, *, aggregation: Aggregation = Aggregation.TOKEN_MEAN, coef: float = 1.0, name: str = "actor/nll"
) -> Tensor:
    """coef · aggregate of −log π over the trained tokens, a scalar; their mean, in nats, is the metric `name`."""
    batch.log(name, -batch.logprobs)
    return coef * batch.aggregate(-batch.logprobs, aggregation)

"""What a policy gradient makes of ratios and advantages: the clipped surrogate of PPO, and those that take its place.

With l_t = log π − log π_old of token t, ρ its ratio or that of its response (`Ratio`), and A its advantage, each gives
a loss for every token. All have the same gradient where π is π_old, that of −A log π, or of −A log ρ for ratios of
responses: they differ in what a policy that has moved away still learns.

Shapes: R response tokens of a micro-batch. Tensors come in; torch is not imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

Tensor = Any
MOST_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this, so that one token cannot overflow exp."""
LEAST_LOG_WEIGHT = math.log(1e-8)
"""The least log w of a response in VESPO, as in the paper's code."""


class Ratio(StrEnum):
    """What the probability ratio ρ is taken over, with l_t = log π − log π_old of token t. A sequence ratio is one
    number for all tokens of a response; with the aggregation `seq-mean-token-mean` the loss is then a mean over
    responses, with any other one it weighs them by their length."""

    TOKEN = "token"
    """exp(l_t) (PPO, GRPO, DAPO)."""
    SEQUENCE_MEAN = "sequence-mean"
    """exp(mean_t l_t), the length-normalised ratio of GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 7)."""
    SEQUENCE_PRODUCT = "sequence-product"
    """exp(Σ_t l_t), that of the whole response (RLOO). A KL in the loss is then summed over the response too."""


class LossType(StrEnum):
    """The loss of a token."""

    CLIP = "clip"
    """−min(ρ A, clip(ρ, 1 − clip_low, 1 + clip_high) A): see `clipped_surrogate`."""
    CISPO = "cispo"
    """−min(ρ, 1 + clip_high) · A · log π, the first factor constant: a token whose weight is clipped has a gradient too
    (MiniMax-M1, arXiv 2506.13585, eq. 4, 5, without a lower bound, as there). With a ratio of responses log π is taken
    over what ρ is."""
    SAPO = "sapo"
    """−4/τ · σ(τ (ρ − 1)) · A, a soft gate in place of the clip; τ is `temperature_pos` where A > 0, else
    `temperature_neg` (Gao et al. 2025, arXiv 2511.20347)."""
    GMPO = "gmpo"
    """−A times the geometric mean over a response of its tokens' ratios, log ρ_t bounded by clip_high above where A > 0
    and by −clip_low below where A < 0 (Zhao et al. 2025, arXiv 2507.20673: 0.4 both)."""
    VESPO = "vespo"
    """−φ(w) · A · log π, φ(w) = w^k exp(λ (1 − w)) constant, w = exp(Σ_t l_t) of the whole response; k and λ by the
    sign of A (arXiv 2602.10693): φ(1) = 1, and it falls on both sides where k = λ."""


OF_RESPONSES = (LossType.GMPO, LossType.VESPO)
"""They take a ratio of a whole response by themselves, and need one advantage for all of its tokens."""


class _Batch(Protocol):
    """What is asked of a `losses.LossBatch`."""

    @property
    def logprobs(self) -> Tensor: ...

    mask: Tensor

    def sequence_sum(self, values_R: Tensor) -> Tensor: ...

    def log(self, name: str, values: Tensor, per: str = "token") -> None: ...


def log_ratio(batch: _Batch, old_logprobs_R: Tensor, how: Ratio | str) -> Tensor:
    """log ρ [R] of the current to the old policy; for a sequence ratio the same number at all tokens of a response."""
    return _over(batch, batch.logprobs - old_logprobs_R, how)


def _over(batch: _Batch, values_R: Tensor, how: Ratio | str) -> Tensor:
    match Ratio(how):
        case Ratio.TOKEN:
            return values_R
        case Ratio.SEQUENCE_MEAN:
            return batch.sequence_sum(values_R) / batch.sequence_sum(batch.mask).clamp(min=1)
        case Ratio.SEQUENCE_PRODUCT:
            return batch.sequence_sum(values_R)


@dataclass(frozen=True)
class Surrogate:
    """A loss type with its numbers. Those that it does not read have no effect."""

    loss_type: LossType = LossType.CLIP
    ratio: Ratio = Ratio.TOKEN
    """Must be `token` for those of `OF_RESPONSES`."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """See `clipped_surrogate`."""
    temperature_pos: float = 1.0
    temperature_neg: float = 1.05
    k_pos: float = 2.0
    k_neg: float = 3.0
    lambda_pos: float = 3.0
    lambda_neg: float = 2.0

    def losses(self, batch: _Batch, advantages_R: Tensor, old_R: Tensor) -> tuple[Tensor, Tensor]:
        """The loss [R] and ρ [R], both differentiable; logs the share of tokens that are clipped, `actor/pg_clipfrac`,
        where something is, and of VESPO the mean weight of a token, `actor/vespo_phi`."""
        log_R = log_ratio(batch, old_R, self.ratio)
        ratio_R = ratio_of(log_R)
        clipped_R = None
        match self.loss_type:
            case LossType.CLIP:
                bounds = self.clip_low, self.clip_high, self.dual_clip
                loss_R, clipped_R = clipped_surrogate(ratio_R, advantages_R, *bounds)
            case LossType.CISPO:
                weights_R = ratio_R.detach()
                clipped_R = (weights_R > 1 + self.clip_high).to(ratio_R.dtype)
                weights_R = weights_R.clamp(max=1 + self.clip_high)
                loss_R = -weights_R * advantages_R * _over(batch, batch.logprobs, self.ratio)
            case LossType.SAPO:
                taus_R = _by_sign(advantages_R > 0, self.temperature_pos, self.temperature_neg, ratio_R)
                loss_R = -(taus_R * (ratio_R - 1)).sigmoid() * 4 / taus_R * advantages_R
            case LossType.GMPO:
                loss_R, clipped_R = self._geometric(batch, log_R, advantages_R)
            case LossType.VESPO:
                phi_R = self._phi(batch, log_R.detach(), advantages_R)
                batch.log("actor/vespo_phi", phi_R)
                loss_R = -phi_R * advantages_R * batch.logprobs
        if clipped_R is not None:
            batch.log("actor/pg_clipfrac", clipped_R)
        return loss_R, ratio_R

    def _geometric(self, batch: _Batch, log_R: Tensor, advantages_R: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of GMPO and which tokens are clipped, [R] each."""
        signs_R = advantages_R.sign()
        gains_R = signs_R * log_R
        bounds_R = _by_sign(advantages_R > 0, self.clip_high, self.clip_low, log_R)
        means_R = _over(batch, signs_R * gains_R.minimum(bounds_R), Ratio.SEQUENCE_MEAN)
        loss_R = -ratio_of(means_R) * advantages_R
        return loss_R, (gains_R.detach() > bounds_R).to(log_R.dtype)

    def _phi(self, batch: _Batch, log_R: Tensor, advantages_R: Tensor) -> Tensor:
        """φ(w) of VESPO [R], in the logarithm."""
        bounded_R = log_R.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
        log_w_R = batch.sequence_sum(bounded_R).clamp(LEAST_LOG_WEIGHT, MOST_LOG_RATIO)
        is_up_R = advantages_R >= 0
        k_R = _by_sign(is_up_R, self.k_pos, self.k_neg, log_R)
        lambda_R = _by_sign(is_up_R, self.lambda_pos, self.lambda_neg, log_R)
        return (lambda_R + k_R * log_w_R - lambda_R * log_w_R.exp()).exp()


CLIPPED = Surrogate()
"""PPO's."""


def _by_sign(is_up_R: Tensor, up: float, down: float, like_R: Tensor) -> Tensor:
    """[R], of the dtype of `like_R`: one number or the other."""
    return like_R.new_full(like_R.shape, up).where(is_up_R, down)


def ratio_of(log_ratio_R: Tensor) -> Tensor:
    """ρ [R] of its logarithm, which is clamped to ± `MOST_LOG_RATIO`."""
    return log_ratio_R.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def clipped_surrogate(
    ratio_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token (Schulman et al. 2017, eq. 7), with separate bounds (DAPO, eq. 10).

    Args:
        dual_clip: c of the dual clip (Ye et al. 2020, arXiv 1912.09729, eq. 5): where A < 0 the loss is at most −c A,
            so that a token which has become much more likely does not take over the batch.

    Returns:
        loss [R] = −min(ρ A, clip(ρ, 1−clip_low, 1+clip_high) A), and whether each token is clipped [R] (float), by
        either clip.
    """
    plain_R = ratio_R * advantages_R
    gain_R = plain_R.minimum(ratio_R.clamp(1 - clip_low, 1 + clip_high) * advantages_R)
    if dual_clip is not None:
        gain_R = gain_R.maximum(dual_clip * advantages_R).where(advantages_R < 0, gain_R)
    return -gain_R, (gain_R != plain_R).to(plain_R.dtype)

"""Options that several algorithms share. A key has one meaning everywhere; only defaults differ. (`beta` alone, which
no class here has, is what the paper of each algorithm calls so.)"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from plait.algorithms.correction import BOUNDS, Corrected, Correction
from plait.algorithms.kl import KLController, KLPlace
from plait.algorithms.losses import Aggregation, KLEstimator
from plait.algorithms.surrogates import OF_RESPONSES, LossType, Ratio, Surrogate
from plait.settings import Settings


class UpdateOptions(Settings):
    """How a batch becomes optimizer steps."""

    mini_batches: int = Field(default=1, ge=1, description="mini-batches per step, one optimizer step each")
    epochs: int = Field(default=1, ge=1, description="passes over the batch per step")

    @property
    def updates(self) -> int:
        """Optimizer steps per batch."""
        return self.mini_batches * self.epochs


class LogprobSource(StrEnum):
    """Where the log-probs of the policy that a batch begins with come from."""

    TRAINER = "trainer"
    """A forward of the trainer: exactly what the first update computes again."""
    ENGINE = "engine"
    """What the engine recorded when it sampled: a forward less, and as far off as engine and trainer are."""


READ_WITH: dict[str, tuple[LossType, ...]] = {
    "clip_low": (LossType.CLIP, LossType.GMPO),
    "clip_high": (LossType.CLIP, LossType.CISPO, LossType.GMPO),
    "dual_clip": (LossType.CLIP,),
    "sapo_temperature_pos": (LossType.SAPO,),
    "sapo_temperature_neg": (LossType.SAPO,),
    "vespo_k_pos": (LossType.VESPO,),
    "vespo_k_neg": (LossType.VESPO,),
    "vespo_lambda_pos": (LossType.VESPO,),
    "vespo_lambda_neg": (LossType.VESPO,),
}
"""Key → the loss types that read it."""


class PolicyOptions(UpdateOptions):
    """Options of every algorithm that updates a policy by ratios and advantages."""

    has_advantages_of_responses: ClassVar[bool] = False
    """Whether all tokens of a response have the same advantage."""

    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL to the reference; 0 needs no reference")
    kl_estimator: KLEstimator = Field(default=KLEstimator.K1, description="k1, k2 or k3; in the loss k2 or k3")
    target_kl: float | None = Field(
        default=None, gt=0, description="KL of a response in nats that the weight of the KL steers to; null: it stays"
    )
    kl_horizon: int = Field(
        default=10_000, ge=1, description="the weight changes by at most 20 % over this many responses"
    )
    old_logprobs: LogprobSource = Field(
        default=LogprobSource.TRAINER, description="trainer, or engine (those of the sampling: saves a forward)"
    )
    loss_type: LossType = Field(
        default=LossType.CLIP,
        description="clip, cispo, sapo, gmpo or vespo: what becomes of a token that is more or less likely than it was",
    )
    clip_low: float = Field(
        default=0.2, gt=0, lt=1, description="lower clip of the probability ratio, in gmpo of its logarithm"
    )
    clip_high: float = Field(
        default=0.2, gt=0, description="upper clip of the probability ratio, in gmpo of its logarithm"
    )
    dual_clip: float | None = Field(
        default=None,
        gt=1,
        description="where the advantage is negative the ratio counts at most this (3.0); null: no limit",
    )
    sapo_temperature_pos: float = Field(
        default=1.0, gt=0, description="how sharply sapo attenuates tokens of positive advantages"
    )
    sapo_temperature_neg: float = Field(default=1.05, gt=0, description="the same of the other tokens")
    vespo_k_pos: float = Field(
        default=2.0, ge=0, description="exponent of a response's ratio in vespo, of advantages that are not negative"
    )
    vespo_k_neg: float = Field(default=3.0, ge=0, description="the same of negative advantages")
    vespo_lambda_pos: float = Field(
        default=3.0, gt=0, description="how fast vespo's weight falls with the ratio, of advantages not negative"
    )
    vespo_lambda_neg: float = Field(default=2.0, gt=0, description="the same of negative advantages")
    aggregation: Aggregation = Field(
        default=Aggregation.TOKEN_MEAN, description="token-mean, seq-mean-token-mean or seq-mean-token-sum-norm"
    )
    entropy_coef: float = Field(
        default=0.0, ge=0, description="weight of the entropy bonus: the loss less this times the entropy; 0: none"
    )
    ptx_coef: float = Field(
        default=0.0,
        ge=0,
        description="weight of the cross entropy on given examples (`pretraining`) in the loss; 0: none is trained",
    )
    correction: Correction = Field(
        default=Correction.OFF,
        description="off, tis, icepop, seq_tis, seq_icepop, seq_mask or geo_mask: what samples of other weights than "
        "those that a step begins with count; tis where `max_staleness` is above 0 and nothing is said",
    )
    correction_low: float | None = Field(
        default=None, gt=0, description="least weight of `correction`; null: the field's"
    )
    correction_high: float | None = Field(
        default=None, gt=0, description="largest weight of `correction`; null: the field's"
    )
    off_policy_mask_threshold: float | None = Field(
        default=None,
        gt=0,
        description="responses of negative advantage count no more once the policy finds them less likely than when "
        "they were drawn, by more than this per token, in nats; null: all count",
    )

    def check_read(self) -> None:
        """Raises ValueError as `Settings.check_read`, and where a number is set that `loss_type` does not read."""
        self._check_switch("kl_coef", "`options.kl_coef` above 0", "kl_estimator")
        self._check_switch("target_kl", "`options.target_kl`", "kl_horizon")
        for key, types in READ_WITH.items():
            if self.loss_type not in types and getattr(self, key) != type(self).model_fields[key].get_default():
                raise ValueError(
                    f"{key} is set, but has no effect with loss_type: {self.loss_type}; remove `options.{key}`, or set "
                    f"`options.loss_type` to {' or '.join(types)}"
                )
        self._check_switch("correction", "`options.correction`", "correction_low", "correction_high")

    @property
    def compares(self) -> bool:
        """Whether the loss needs a ratio to log-probs from before training. The trainer's are equal to the new ones if
        a batch is used once; the engine's always differ from them."""
        return self.updates > 1 or self.old_logprobs is LogprobSource.ENGINE

    def surrogate(self, ratio: Ratio) -> Surrogate:
        """For the loss."""
        return Surrogate(
            self.loss_type,
            ratio,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            temperature_pos=self.sapo_temperature_pos,
            temperature_neg=self.sapo_temperature_neg,
            k_pos=self.vespo_k_pos,
            k_neg=self.vespo_k_neg,
            lambda_pos=self.vespo_lambda_pos,
            lambda_neg=self.vespo_lambda_neg,
        )

    @property
    def kl_controller(self) -> KLController | None:
        """Adapts the weight of the KL; None: it stays."""
        return None if self.target_kl is None else KLController(self.target_kl, self.kl_horizon)

    @model_validator(mode="after")
    def _check_loss_type(self) -> Self:
        if self.loss_type in OF_RESPONSES and not self.has_advantages_of_responses:
            raise ValueError(
                f"loss_type: {self.loss_type} weighs whole responses, but the advantages of this algorithm are of "
                "tokens; set `options.loss_type` to clip, cispo or sapo, or `algorithm` to grpo or rloo"
            )
        if self.loss_type is LossType.VESPO and self.correction is not Correction.OFF:
            raise ValueError(
                f"loss_type: vespo bounds the ratio of whole responses, and correction: {self.correction} would weigh "
                "them twice; set `options.old_logprobs` to engine, so that the ratio is to the policy that drew the "
                "samples, and `options.correction` to off"
            )
        return self

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target_kl is not None and self.kl_coef == 0:
            raise ValueError(
                "target_kl needs a weight of the KL to begin with; set `options.kl_coef` above 0 or "
                "`options.target_kl` to null"
            )
        return self

    @model_validator(mode="after")
    def _check_correction(self) -> Self:
        if self.correction in BOUNDS and BOUNDS[self.correction][0] is None and self.correction_low is not None:
            raise ValueError(
                f"correction: {self.correction} only bounds weights from above; remove `options.correction_low`"
            )
        if (bound := self.corrected) is not None and bound.low is not None and bound.low >= bound.high:
            raise ValueError(
                f"correction keeps weights from {bound.low:g} to {bound.high:g}, which are none; set "
                "`options.correction_low` below `options.correction_high`"
            )
        if self.correction is not Correction.OFF and self.old_logprobs is LogprobSource.ENGINE:
            raise ValueError(
                f"correction: {self.correction} weighs samples by the trainer's log-probs over the engine's, but "
                "old_logprobs takes the engine's for both; set `options.old_logprobs` to trainer or "
                "`options.correction` to off"
            )
        return self

    @classmethod
    def of_older_samples(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Stated options where samples may be of older weights: these are corrected for, unless they say otherwise or
        the ratio is to the log-probs that they were drawn with."""
        if options.get("old_logprobs") == LogprobSource.ENGINE:
            return options
        return {"correction": Correction.TIS, **options}

    @property
    def corrected(self) -> Corrected | None:
        """For the loss; None: nothing is corrected."""
        if self.correction is Correction.OFF:
            return None
        low, high = BOUNDS[self.correction]
        low = low if self.correction_low is None else self.correction_low
        return Corrected(self.correction, low, self.correction_high or high)


class KLPlaceOptions(PolicyOptions):
    """Options of algorithms whose KL may be in the reward or in the loss."""

    takes_k1_in_loss: ClassVar[bool] = False
    """Whether a KL in the loss may be k1, which has no effect there unless weighed."""
    kl_in: KLPlace = Field(default=KLPlace.REWARD, description="reward (taken off it), or loss (then with k2 or k3)")
    weigh_kl_by_ratio: bool = Field(
        default=False,
        description="multiply the KL in the loss (k1 or k3) by the probability ratio: the KL's unbiased gradient",
    )

    def check_read(self) -> None:
        super().check_read()
        self._check_switch("kl_coef", "`options.kl_coef` above 0", "kl_in", "weigh_kl_by_ratio")

    @model_validator(mode="after")
    def _check_weighing(self) -> Self:
        if self.weigh_kl_by_ratio and self.kl_in is not KLPlace.LOSS:
            raise ValueError(
                "weigh_kl_by_ratio is about the KL in the loss, but kl_in is reward; set `options.kl_in` to loss or "
                "`options.weigh_kl_by_ratio` to false"
            )
        if self.weigh_kl_by_ratio and self.kl_estimator is KLEstimator.K2:
            raise ValueError(
                "weigh_kl_by_ratio with kl_estimator: k2 has not the gradient of a KL: k2 has it unweighed; set "
                "`options.kl_estimator` to k1 or k3, or `options.weigh_kl_by_ratio` to false"
            )
        return self

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        has_no_effect = self.kl_estimator is KLEstimator.K1 and not self.weigh_kl_by_ratio
        if self.kl_in is KLPlace.LOSS and has_no_effect and not self.takes_k1_in_loss:
            raise ValueError(
                "kl_in: loss with kl_estimator: k1 has no effect, as the gradient of k1 averages to 0; "
                "set `options.kl_estimator` to k2 (the gradient of the KL) or k3, `options.weigh_kl_by_ratio` to true, "
                "or `options.kl_in` to reward"
            )
        return self

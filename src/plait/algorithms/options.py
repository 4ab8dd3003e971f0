"""Options that several algorithms share. A key has one meaning everywhere; only defaults differ."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plait.algorithms.kl import KLPlace
from plait.algorithms.losses import Aggregation, KLEstimator


class UpdateOptions(BaseModel):
    """How a batch becomes optimizer steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mini_batches: int = Field(1, ge=1, description="mini-batches per step, one optimizer step each")
    epochs: int = Field(1, ge=1, description="passes over the batch per step")

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


class PolicyOptions(UpdateOptions):
    """Of every algorithm that updates a policy by the clipped surrogate."""

    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference; 0 needs no reference")
    kl_estimator: KLEstimator = Field(KLEstimator.K1, description="k1, k2 or k3; in the loss k2 or k3")
    old_logprobs: LogprobSource = Field(
        LogprobSource.TRAINER, description="trainer, or engine (those of the sampling: saves a forward)"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="lower clip of the probability ratio")
    clip_high: float = Field(0.2, gt=0, description="upper clip of the probability ratio")
    dual_clip: float | None = Field(
        None, gt=1, description="where the advantage is negative the ratio counts at most this (3.0); null: no limit"
    )
    aggregation: Aggregation = Field(
        Aggregation.TOKEN_MEAN, description="token-mean, seq-mean-token-mean or seq-mean-token-sum-norm"
    )


class KLPlaceOptions(PolicyOptions):
    """Of algorithms whose KL may be in the reward or in the loss."""

    kl_in: KLPlace = Field(KLPlace.REWARD, description="reward (taken off it), or loss (then with k2 or k3)")

    @model_validator(mode="after")
    def _check_kl(self) -> Self:
        if self.kl_in is KLPlace.LOSS and self.kl_estimator is KLEstimator.K1:
            raise ValueError(
                "kl_in: loss with kl_estimator: k1 has no effect, as the gradient of k1 averages to 0; "
                "set `options.kl_estimator` to k2 (the gradient of the KL) or k3, or `options.kl_in` to reward"
            )
        return self

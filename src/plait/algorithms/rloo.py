"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740).

A response is one action: its advantage is its reward less the mean reward of its siblings, which does not depend on it,
so the gradient is unbiased. The KL to the reference is in the reward (k1, as in the paper) or in the loss. The default
loss is TRL's: the clipped surrogate of the ratio of whole responses, averaged over responses; where a batch is used
once it is plain REINFORCE. `ratio: token` gives the token-wise loss of verl and OpenRLHF.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plait.algorithms.advantages import FloatArray, centred, standardised
from plait.algorithms.kl import KLPlace, check_kl_gradient, policy_logprobs, subtract_kl
from plait.algorithms.losses import Aggregation, KLEstimator, LossBatch, Ratio, policy_loss
from plait.dataflow import Prompts, Role, per_batch, per_group, per_sample


class RLOOOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference; 0 needs no reference")
    kl_estimator: KLEstimator = Field(KLEstimator.K1, description="k1, k2 or k3; in the loss k2 or k3")
    kl_in: KLPlace = Field(KLPlace.REWARD, description="reward (subtracted from each sample's score), or loss")
    normalize_advantages: bool = Field(False, description="standardise advantages over the batch")
    clip_low: float = Field(0.2, gt=0, lt=1, description="lower clip of the probability ratio")
    clip_high: float = Field(0.2, gt=0, description="upper clip of the probability ratio")
    ratio: Ratio = Field(Ratio.SEQUENCE_PRODUCT, description="sequence-product, sequence-mean or token")
    aggregation: Aggregation = Field(
        Aggregation.SEQUENCE_MEAN, description="seq-mean-token-mean, token-mean or seq-mean-token-sum-norm"
    )
    mini_batches: int = Field(1, ge=1, description="mini-batches per step, one optimizer step each")
    epochs: int = Field(1, ge=1, description="passes over the batch per step")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_kl_gradient(self.kl_in, self.kl_estimator)
        return self


def rloo(prompts: Prompts, actor: Role, reward: Role, options: RLOOOptions, ref: Role | None = None) -> None:
    """The flow. The reference is called only when `kl_coef` > 0."""
    samples = actor.generate(prompts)
    rewards = reward.score(samples)
    logprobs = policy_logprobs(
        actor,
        ref,
        samples,
        kl_coef=options.kl_coef,
        kl_in=options.kl_in,
        updates=options.mini_batches * options.epochs,
    )
    if logprobs.in_reward is not None:
        rewards = per_sample(
            subtract_kl,
            rewards,
            *logprobs.in_reward,
            name="rewards",
            kl_coef=options.kl_coef,
            estimator=options.kl_estimator,
        )
    advantages = per_group(leave_one_out_advantages, rewards, name="advantages")
    if options.normalize_advantages:
        advantages = per_batch(standardised, advantages, name="normalized_advantages", epsilon=1e-4)
    actor.train(
        samples,
        loss=partial(rloo_loss, options=options),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        advantages=advantages,
        old_logprobs=logprobs.old,
        ref_logprobs=logprobs.ref,
    )


def leave_one_out_advantages(rewards: FloatArray) -> FloatArray:
    """A_i = r_i − mean of the other n − 1 rewards of the group, which is n / (n − 1) · (r_i − mean r).

    A group of one sample has no baseline and gets 0, as do equal rewards.
    """
    return centred(rewards) * len(rewards) / max(1, len(rewards) - 1)


def rloo_loss(
    batch: LossBatch,
    advantages: Any,
    *,
    options: RLOOOptions,
    old_logprobs: Any = None,
    ref_logprobs: Any = None,
) -> Any:
    """−min(ρ A, clip(ρ) A) with the ratio ρ of the whole response, plus kl_coef · KL when the KL is in the loss."""
    return policy_loss(
        batch,
        advantages,
        old_logprobs,
        ref_logprobs,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        aggregation=options.aggregation,
        ratio=options.ratio,
        kl_coef=options.kl_coef if options.kl_in is KLPlace.LOSS else 0.0,
        kl_estimator=options.kl_estimator,
    )

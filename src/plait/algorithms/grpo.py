"""GRPO: group-relative policy optimisation (Shao et al. 2024, DeepSeekMath, §4.1).

Several responses are drawn per prompt; a response's advantage is its reward against those of its siblings, so no
critic is needed. The loss is PPO's clipped surrogate, with a KL penalty to the reference in the loss or in the reward.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from plait.algorithms.losses import Aggregation, KLEstimator, LossBatch, clipped_policy_loss, kl_estimate
from plait.dataflow import Prompts, Role, per_group, per_sample
from plait.errors import FlowError

FloatArray = np.ndarray[Any, np.dtype[np.float64]]


class KLPlace(StrEnum):
    LOSS = "loss"
    REWARD = "reward"


class GRPOOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_enum_values=False)

    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference; 0 needs no reference")
    kl_estimator: KLEstimator = Field(KLEstimator.K3, description="k1, k2 or k3")
    kl_in: KLPlace = Field(KLPlace.LOSS, description="loss, or reward (subtracted from each sample's score)")
    clip_low: float = Field(0.2, gt=0, lt=1, description="lower clip of the probability ratio")
    clip_high: float = Field(0.2, gt=0, description="upper clip of the probability ratio (DAPO: 0.28)")
    aggregation: Aggregation = Field(
        Aggregation.SEQUENCE_MEAN, description="token-mean, seq-mean-token-mean or seq-mean-token-sum-norm"
    )
    scale_rewards: bool = Field(True, description="divide advantages by the group's standard deviation")
    mini_batches: int = Field(1, ge=1, description="mini-batches per step, one optimizer step each")
    epochs: int = Field(1, ge=1, description="passes over the batch per step")


def grpo(prompts: Prompts, actor: Role, reward: Role, options: GRPOOptions, ref: Role | None = None) -> None:
    """The flow. The reference is called only when `kl_coef` > 0."""
    samples = actor.generate(prompts)
    rewards = reward.score(samples)
    ref_logprobs = _reference(ref).logprobs(samples) if options.kl_coef > 0 else None
    # Used once, a batch is on-policy and the ratio's old log-probs are the new ones; used again, they are kept.
    reused = options.mini_batches * options.epochs > 1
    old_logprobs = actor.logprobs(samples) if reused else None
    if ref_logprobs is not None and options.kl_in is KLPlace.REWARD:
        now = old_logprobs if old_logprobs is not None else actor.logprobs(samples)
        rewards = per_sample(
            subtract_kl,
            rewards,
            now,
            ref_logprobs,
            name="rewards",
            kl_coef=options.kl_coef,
            estimator=options.kl_estimator,
        )
    advantages = per_group(group_advantages, rewards, name="advantages", scale=options.scale_rewards)
    actor.train(
        samples,
        loss=partial(grpo_loss, options=options),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        advantages=advantages,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
    )


def group_advantages(rewards: FloatArray, scale: bool = True, epsilon: float = 1e-4) -> FloatArray:
    """A_i = (r_i − mean r) / (std r + ε), the sample standard deviation (ddof 1) as in the published code.

    A group of one sample, or of equal rewards, gets advantages of exactly 0.
    """
    centred = rewards - rewards.mean()
    if len(rewards) < 2 or np.ptp(rewards) == 0:
        return np.zeros_like(centred)
    return centred / (rewards.std(ddof=1) + epsilon) if scale else centred


def subtract_kl(
    score: float, logprobs: FloatArray, ref_logprobs: FloatArray, kl_coef: float, estimator: KLEstimator
) -> float:
    """KL in the reward: score − kl_coef · Σ_t kl_t over the response."""
    difference = np.clip(logprobs - ref_logprobs, -20.0, 20.0)
    match estimator:
        case KLEstimator.K1:
            kl = difference
        case KLEstimator.K2:
            kl = difference**2 / 2
        case KLEstimator.K3:
            kl = np.exp(-difference) - 1 + difference
    return score - kl_coef * float(kl.sum())


def grpo_loss(
    batch: LossBatch,
    advantages: Any,
    *,
    options: GRPOOptions,
    old_logprobs: Any = None,
    ref_logprobs: Any = None,
) -> Any:
    """Clipped surrogate, plus kl_coef · KL when the KL is in the loss. All columns are [R], advantages too."""
    old = batch.logprobs.detach() if old_logprobs is None else old_logprobs
    loss, ratio, clipped = clipped_policy_loss(batch.logprobs, old, advantages, options.clip_low, options.clip_high)
    batch.log("actor/pg_loss", loss)
    batch.log("actor/pg_clipfrac", clipped)
    batch.log("actor/ppo_kl", (ratio - 1) - (batch.logprobs - old))
    if ref_logprobs is not None:
        kl = kl_estimate(batch.logprobs, ref_logprobs, options.kl_estimator)
        batch.log("kl", kl_estimate(batch.logprobs, ref_logprobs, KLEstimator.K3))
        if options.kl_in is KLPlace.LOSS:
            loss = loss + options.kl_coef * kl
    return batch.aggregate(loss, options.aggregation)


def _reference(ref: Role | None) -> Role:
    if ref is None:
        raise FlowError(
            "kl_coef > 0 needs the role `ref`, which nothing fills; set options.kl_coef to 0 or give a reference"
        )
    return ref

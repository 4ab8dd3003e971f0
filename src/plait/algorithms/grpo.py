"""GRPO: group-relative policy optimisation (Shao et al. 2024, DeepSeekMath, §4.1), and its relatives by options.

Several responses are drawn per prompt; a response's advantage is its reward against those of its siblings, so no
critic is needed. The loss is PPO's clipped surrogate, with a KL penalty to the reference in the loss or in the reward.
DAPO, Dr. GRPO and GSPO are settings of the options below; `docs/algorithms.md` lists them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from plait.algorithms.advantages import FloatArray, centred, standardised
from plait.algorithms.kl import KLPlace, policy_logprobs, subtract_kl
from plait.algorithms.losses import Aggregation, KLEstimator, LossBatch, Ratio, policy_loss
from plait.dataflow import Prompts, Role, per_group, per_sample


class GRPOOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_enum_values=False)

    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference; 0 needs no reference")
    kl_estimator: KLEstimator = Field(
        KLEstimator.K3, description="k1 (in the loss its gradient averages to 0), k2 or k3"
    )
    kl_in: KLPlace = Field(KLPlace.LOSS, description="loss, or reward (subtracted from each sample's score)")
    clip_low: float = Field(0.2, gt=0, lt=1, description="lower clip of the probability ratio")
    clip_high: float = Field(0.2, gt=0, description="upper clip of the probability ratio (DAPO: 0.28)")
    ratio: Ratio = Field(Ratio.TOKEN, description="token, sequence-mean (GSPO) or sequence-product")
    aggregation: Aggregation = Field(
        Aggregation.SEQUENCE_MEAN, description="token-mean, seq-mean-token-mean or seq-mean-token-sum-norm"
    )
    scale_rewards: bool = Field(True, description="divide advantages by the group's standard deviation")
    overlong_buffer_tokens: int = Field(
        0, ge=0, description="the last so many tokens below the response limit cost reward (DAPO); 0: none do"
    )
    overlong_penalty: float = Field(1.0, ge=0, description="what a response costs that uses the whole limit")
    mask_truncated: bool = Field(False, description="truncated responses count in the group, but are not trained on")
    mini_batches: int = Field(1, ge=1, description="mini-batches per step, one optimizer step each")
    epochs: int = Field(1, ge=1, description="passes over the batch per step")


def grpo(prompts: Prompts, actor: Role, reward: Role, options: GRPOOptions, ref: Role | None = None) -> None:
    """The flow. The reference is called only when `kl_coef` > 0."""
    samples = actor.generate(prompts)
    rewards = reward.score(samples)
    if options.overlong_buffer_tokens > 0:
        rewards = per_sample(
            subtract_overlong,
            rewards,
            samples.tokens_left,
            name="shaped_rewards",
            buffer_tokens=options.overlong_buffer_tokens,
            penalty=options.overlong_penalty,
        )
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
    advantages = per_group(group_advantages, rewards, name="advantages", scale=options.scale_rewards)
    actor.train(
        samples,
        loss=partial(grpo_loss, options=options),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        keep=samples.finished if options.mask_truncated else None,
        advantages=advantages,
        old_logprobs=logprobs.old,
        ref_logprobs=logprobs.ref,
    )


def group_advantages(rewards: FloatArray, scale: bool = True, epsilon: float = 1e-4) -> FloatArray:
    """A_i = (r_i − mean r) / (std r + ε), the sample standard deviation (ddof 1) as in the published code.

    A group of one sample, or of equal rewards, gets advantages of exactly 0.
    """
    return standardised(rewards, epsilon) if scale else centred(rewards)


def subtract_overlong(reward: float, tokens_left: float, buffer_tokens: int, penalty: float) -> float:
    """Soft overlong punishment (Yu et al. 2025, DAPO, arXiv 2503.14476, eq. 13).

    Nothing while at least `buffer_tokens` are left below the response limit, then linear, `penalty` at the limit.
    """
    return reward - penalty * max(0.0, buffer_tokens - tokens_left) / buffer_tokens


def grpo_loss(
    batch: LossBatch,
    advantages: Any,
    *,
    options: GRPOOptions,
    old_logprobs: Any = None,
    ref_logprobs: Any = None,
) -> Any:
    """Clipped surrogate, plus kl_coef · KL when the KL is in the loss. All columns are [R], advantages too."""
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

"""ReMax: REINFORCE with the reward of the greedy response as the baseline (Li et al. 2023, arXiv 2310.10505).

Beside the samples, one response per prompt is decoded greedily; an advantage is the score of a sample less the score of
that response. It needs neither a critic nor several samples per prompt. The KL is in the reward of each token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from plait.algorithms.advantages import FloatArray
from plait.algorithms.kl import KLPlace, policy_logprobs, reward_to_go
from plait.algorithms.losses import Aggregation, KLEstimator, LossBatch, policy_loss
from plait.dataflow import Level, Prompts, Role, per_group, per_sample


class ReMaxOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    kl_coef: float = Field(0.0, ge=0, description="weight of the KL in the reward; 0 needs no reference")
    kl_estimator: KLEstimator = Field(KLEstimator.K1, description="k1, k2 or k3")
    clip_low: float = Field(0.2, gt=0, lt=1, description="lower clip of the probability ratio")
    clip_high: float = Field(0.2, gt=0, description="upper clip of the probability ratio")
    aggregation: Aggregation = Field(
        Aggregation.CONSTANT, description="seq-mean-token-sum-norm, token-mean or seq-mean-token-mean"
    )
    mini_batches: int = Field(1, ge=1, description="mini-batches per step, one optimizer step each")
    epochs: int = Field(1, ge=1, description="passes over the batch per step")


def remax(prompts: Prompts, actor: Role, reward: Role, options: ReMaxOptions, ref: Role | None = None) -> None:
    """The flow: two rollouts of the same weights. The reference is called only when `kl_coef` > 0."""
    samples = actor.generate(prompts)
    greedy = actor.generate(prompts, greedy=True, samples_per_prompt=1)
    advantages = per_group(over_greedy, reward.score(samples), reward.score(greedy), name="score_over_greedy")
    logprobs = policy_logprobs(
        actor,
        ref,
        samples,
        kl_coef=options.kl_coef,
        kl_in=KLPlace.REWARD,
        updates=options.mini_batches * options.epochs,
    )
    if logprobs.in_reward is not None:
        advantages = per_sample(
            reward_to_go,
            advantages,
            *logprobs.in_reward,
            name="advantages",
            level=Level.TOKEN,
            kl_coef=options.kl_coef,
            estimator=options.kl_estimator,
        )
    actor.train(
        samples,
        loss=partial(remax_loss, options=options),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        advantages=advantages,
        old_logprobs=logprobs.old,
        ref_logprobs=logprobs.ref,
    )


def over_greedy(scores: FloatArray, greedy_scores: FloatArray) -> FloatArray:
    """A_i = r_i − r_greedy of the same prompt: [samples], [1] → [samples].

    Where the greedy response lost its reward ([0]) there is no baseline, and the prompt teaches nothing: 0.
    """
    return scores - greedy_scores[0] if len(greedy_scores) else np.zeros_like(scores)


def remax_loss(
    batch: LossBatch, advantages: Any, *, options: ReMaxOptions, old_logprobs: Any = None, ref_logprobs: Any = None
) -> Any:
    """Where a batch is used once, the gradient of −A_t log π_t; clipped where it is used again. All columns are [R]."""
    return policy_loss(
        batch,
        advantages,
        old_logprobs,
        ref_logprobs,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        aggregation=options.aggregation,
    )

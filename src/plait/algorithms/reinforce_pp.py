"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): no critic, advantages normalised over the whole batch.

The return of a token is the response's score less the KL from that token on (k1 in the reward); all returns of the
batch's tokens are standardised together, with no group statistics, so one response per prompt is enough. With
`group_baseline` the score is first reduced by the mean of its group (REINFORCE++ w/ baseline, for several responses per
prompt; the paper then puts the KL into the loss, as k2). The loss is PPO's clipped surrogate per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from plait.algorithms.advantages import FloatArray, centred, standardised
from plait.algorithms.kl import KLPlace, check_kl_gradient, policy_logprobs, reward_to_go
from plait.algorithms.losses import Aggregation, KLEstimator, LossBatch, policy_loss
from plait.dataflow import Level, Prompts, Role, per_batch, per_group, per_sample


class ReinforcePPOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    group_baseline: bool = Field(
        False, description="subtract the mean score of the group first (the -baseline variant)"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference; 0 needs no reference")
    kl_estimator: KLEstimator = Field(KLEstimator.K1, description="k1, k2 or k3; in the loss k2 or k3")
    kl_in: KLPlace = Field(
        KLPlace.REWARD, description="reward (of each token), or loss (the -baseline variant, with k2)"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="lower clip of the probability ratio")
    clip_high: float = Field(0.2, gt=0, description="upper clip of the probability ratio")
    aggregation: Aggregation = Field(
        Aggregation.TOKEN_MEAN, description="token-mean, seq-mean-token-mean or seq-mean-token-sum-norm"
    )
    mini_batches: int = Field(1, ge=1, description="mini-batches per step, one optimizer step each")
    epochs: int = Field(1, ge=1, description="passes over the batch per step")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_kl_gradient(self.kl_in, self.kl_estimator)
        return self


def reinforce_pp(
    prompts: Prompts, actor: Role, reward: Role, options: ReinforcePPOptions, ref: Role | None = None
) -> None:
    """The flow. The reference is called only when `kl_coef` > 0."""
    samples = actor.generate(prompts)
    scores = reward.score(samples)
    if options.group_baseline:
        scores = per_group(centred, scores, name="centred_scores")
    logprobs = policy_logprobs(
        actor,
        ref,
        samples,
        kl_coef=options.kl_coef,
        kl_in=options.kl_in,
        updates=options.mini_batches * options.epochs,
    )
    if logprobs.in_reward is not None:
        returns = per_sample(
            reward_to_go,
            scores,
            *logprobs.in_reward,
            name="returns",
            level=Level.TOKEN,
            kl_coef=options.kl_coef,
            estimator=options.kl_estimator,
        )
    else:
        returns = per_sample(at_each_token, scores, samples.logprobs, name="returns", level=Level.TOKEN)
    actor.train(
        samples,
        loss=partial(reinforce_pp_loss, options=options),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        advantages=per_batch(whitened, returns, name="advantages", level=Level.TOKEN),
        old_logprobs=logprobs.old,
        ref_logprobs=logprobs.ref,
    )


def at_each_token(score: float, logprobs: FloatArray) -> FloatArray:
    """The undiscounted return of each token where all reward is given at the end. [tokens]."""
    return np.full(len(logprobs), score)


def whitened(returns: Sequence[FloatArray]) -> list[FloatArray]:
    """A_t = (G_t − mean G) / (std G + 1e-8) over all response tokens of the batch, whatever sample they belong to.

    One array per sample in and out. All are 0 where every return is the same.
    """
    ends = np.cumsum([len(part) for part in returns])[:-1]
    return list(np.split(standardised(np.concatenate(list(returns)), 1e-8), ends))


def reinforce_pp_loss(
    batch: LossBatch,
    advantages: Any,
    *,
    options: ReinforcePPOptions,
    old_logprobs: Any = None,
    ref_logprobs: Any = None,
) -> Any:
    """Clipped surrogate per token, plus kl_coef · KL when the KL is in the loss. All columns are [R]."""
    return policy_loss(
        batch,
        advantages,
        old_logprobs,
        ref_logprobs,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        aggregation=options.aggregation,
        kl_coef=options.kl_coef if options.kl_in is KLPlace.LOSS else 0.0,
        kl_estimator=options.kl_estimator,
    )

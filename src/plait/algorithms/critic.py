"""What the flows with a critic have in common: rewards per token, advantages from values, the value loss."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from plait.algorithms.advantages import FloatArray, explained_variance, gae, token_mean
from plait.algorithms.losses import Aggregation, KLEstimator, LossBatch, Tensor, kl_estimate
from plait.algorithms.options import KLPlaceOptions
from plait.algorithms.policy import PolicyLogprobs
from plait.dataflow import Generated, Level, Role, per_batch, per_sample
from plait.dataflow.handles import ColumnHandle, Scores


class Credit(StrEnum):
    """Which token gets what is given for a turn."""

    RESPONSE = "response"
    """The last one of the response gets the score, whatever turn it is for."""
    TURN = "turn"
    """The last one of the turn."""


class CriticOptions(KLPlaceOptions):
    """Options of algorithms that learn values."""

    credit: Credit = Field(
        default=Credit.RESPONSE,
        description="response (the score counts at its last token) or turn (what is given for a turn, at its last)",
    )
    gamma: float = Field(default=1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(default=0.95, ge=0, le=1, description="λ of GAE: 1 trusts the returns, 0 the values")
    value_clip: float | None = Field(
        default=0.2, gt=0, description="a value counts at most this far from what it was; null: it is not clipped"
    )
    bootstrap_truncated: bool = Field(
        default=False, description="a truncated response gets the critic's value of its end in place of its score"
    )
    critic_warmup_steps: int = Field(default=0, ge=0, description="steps in which critics alone are trained")


def credited(scores: Scores, options: CriticOptions) -> ColumnHandle:
    """What token rewards are made of: one score per sample, or with `credit: turn` one number per token."""
    return scores.by_turn if options.credit is Credit.TURN else scores


def token_rewards(
    samples: Generated,
    scores: ColumnHandle,
    logprobs: PolicyLogprobs,
    options: CriticOptions,
    *,
    role: str,
    share: float,
) -> ColumnHandle:
    """The reward of each token that the critic `role` learns: the score at the last one, or what scores of tokens say,
    and −share · kl_coef · kl_t at each where the KL is in the reward."""
    if options.bootstrap_truncated:
        scores = per_sample(if_finished, scores, samples.finished, name=f"{role}_scores_of_finished")
    name, by_turn = f"{role}_token_rewards", options.credit is Credit.TURN
    if logprobs.in_reward:
        return logprobs.with_kl(turns_less_kl if by_turn else score_less_kl, scores, name, Level.TOKEN, share=share)
    return scores if by_turn else per_sample(at_last_token, scores, samples.logprobs, name=name, level=Level.TOKEN)


def train_critic(critic: Role, samples: Generated, rewards: ColumnHandle, options: CriticOptions) -> ColumnHandle:
    """Ask the critic for its values, train it on the returns, and give the advantages, which are not whitened."""
    role = critic.name
    values = critic.values(samples)
    ends = ()
    if options.bootstrap_truncated:
        ends = (per_sample(if_truncated, critic.score(samples), samples.finished, name=f"{role}_value_after"),)
    advantages = per_sample(
        gae, rewards, values, *ends, name=f"{role}_advantages", level=Level.TOKEN, gamma=options.gamma, lam=options.lam
    )
    returns = per_sample(returns_of, advantages, values, name=f"{role}_returns", level=Level.TOKEN)
    per_batch(explained_variance, returns, values, name=f"{role}/vf_explained_var", level=Level.BATCH)
    per_batch(token_mean, values, name=f"{role}/values/mean", level=Level.BATCH)
    per_batch(token_mean, returns, name=f"{role}/returns/mean", level=Level.BATCH)
    per_batch(response_mean, rewards, name=f"{role}/rewards/mean", level=Level.BATCH)
    critic.train(
        samples,
        loss=partial(value_loss, value_clip=options.value_clip, role=role),
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        old_values=values,
        returns=returns,
    )
    return advantages


def score_less_kl(
    score: float,
    logprobs: FloatArray,
    ref_logprobs: FloatArray,
    kl_coef: float,
    estimator: KLEstimator,
    share: float = 1.0,
) -> FloatArray:
    """r_t = −share · kl_coef · kl_t, plus the score of the response at its last token. [tokens] → [tokens]."""
    rewards = -share * kl_coef * kl_estimate(logprobs, ref_logprobs, estimator)
    rewards[-1:] += score
    return rewards


def turns_less_kl(scores: FloatArray, *columns: Any, **constants: Any) -> FloatArray:
    """`score_less_kl` with the score of each turn at its last token. [tokens] → [tokens]."""
    return scores + score_less_kl(0.0, *columns, **constants)


def at_last_token(score: float, logprobs: FloatArray) -> FloatArray:
    """0 at every token but the last, which has the score. [tokens]."""
    rewards = np.zeros(len(logprobs))
    rewards[-1:] = score
    return rewards


def if_finished(score: float, finished: float) -> float:
    """0 for a truncated response: it has not come to what is scored."""
    return score if finished else 0.0


def if_truncated(value: float, finished: float) -> float:
    """The value of the state after the last token; 0 where the response ended (nothing follows)."""
    return 0.0 if finished else value


def returns_of(advantages: FloatArray, values: FloatArray) -> FloatArray:
    """What the critic learns: G_t = A_t + V_t, with the advantages as they were before whitening."""
    return advantages + values


def response_mean(rewards: list[FloatArray]) -> float:
    """Mean over responses of the sum of their tokens' rewards; 0 for no response."""
    return float(np.mean([of_sample.sum() for of_sample in rewards])) if rewards else 0.0


def value_loss(
    batch: LossBatch, old_values: Tensor, returns: Tensor, *, value_clip: float | None, role: str = "critic"
) -> Any:
    """½ · token mean of max((V − G)², (clip(V, V_old ± value_clip) − G)²).

    As in the code of PPO (Dhariwal et al. 2017, baselines `ppo2`), verl and TRL: a value that has moved further than
    the clip in the direction of its return has no gradient. All columns are [R].
    """
    loss_R = (batch.values - returns) ** 2
    if value_clip is not None:
        near_R = batch.values.maximum(old_values - value_clip).minimum(old_values + value_clip)
        clipped_R = (near_R - returns) ** 2
        batch.log(f"{role}/vf_clipfrac", (clipped_R > loss_R).to(loss_R.dtype))
        loss_R = loss_R.maximum(clipped_R)
    batch.log(f"{role}/vf_loss", loss_R / 2)
    return batch.aggregate(loss_R / 2, Aggregation.TOKEN_MEAN)

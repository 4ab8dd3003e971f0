"""PPO with a critic (Schulman et al. 2017, arXiv 1707.06347), as RLHF uses it (Ziegler et al. 2019, arXiv 1909.08593).

Four roles: the actor is trained, a critic learns the value of each state, the reference holds the actor near, the
reward scores whole responses. Advantages are GAE's, whitened over the tokens of the batch; the KL to the reference is
in the reward of each token (k1), its weight fixed or steered to a target. Conventions are TRL's and verl's;
`docs/algorithms.md` says where they differ.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from plait.algorithms.advantages import FloatArray, scaled, token_mean, whitened
from plait.algorithms.critic import Credit, CriticOptions, at_last_token, credited, token_rewards, train_critic
from plait.algorithms.policy import PolicyLogprobs, learnt_beside, policy_logprobs, train_policy
from plait.dataflow import Generated, Given, Level, Prompts, Role, carried, per_batch, per_sample
from plait.dataflow.handles import ColumnHandle, Scores


class RewardNorm(StrEnum):
    NONE = "none"
    STD = "std"
    MEAN_STD = "mean-std"


class PPOOptions(CriticOptions):
    kl_coef: float = Field(default=0.05, ge=0, description="weight of the KL to the reference; 0 needs no reference")
    reward_norm: RewardNorm = Field(
        default=RewardNorm.NONE,
        description="none, std (scores over their running deviation) or mean-std (centred as well)",
    )
    reward_clip: float | None = Field(default=None, gt=0, description="scores count at most this, after reward_norm")
    missing_eos_penalty: float = Field(
        default=0.0, ge=0, description="what a truncated response costs, after reward_clip"
    )
    whiten_rewards: bool = Field(default=False, description="divide token rewards by their deviation over the batch")
    whiten_advantages: bool = Field(default=True, description="standardise advantages over the tokens of the batch")

    @model_validator(mode="after")
    def _check_credit(self) -> Self:
        for name in ("reward_norm", "reward_clip", "bootstrap_truncated"):
            if self.credit is Credit.TURN and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"credit: turn has a score for each turn, but {name} is about the one score of a response; set "
                    f"`options.credit` to response or remove `options.{name}`"
                )
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.whiten_rewards and self.reward_norm is not RewardNorm.NONE:
            raise ValueError(
                "whiten_rewards and reward_norm both divide rewards by a deviation; set `options.whiten_rewards` to "
                "false or `options.reward_norm` to none"
            )
        if self.missing_eos_penalty and self.bootstrap_truncated:
            raise ValueError(
                "missing_eos_penalty is taken off the score of a truncated response, which bootstrap_truncated leaves "
                "out; set `options.missing_eos_penalty` to 0 or `options.bootstrap_truncated` to false"
            )
        return self


def ppo(
    prompts: Prompts,
    actor: Role,
    critic: Role,
    reward: Role,
    options: PPOOptions,
    ref: Role | None = None,
    examples: Given | None = None,
) -> None:
    """The flow. The reference is called only when `kl_coef` > 0, examples are read only when `ptx_coef` > 0."""
    samples = actor.generate(prompts)
    scores = shaped_scores(reward.score(samples), samples, options)
    logprobs = policy_logprobs(actor, ref, samples, options, options.kl_in)
    rewards = shaped_rewards(samples, scores, logprobs, critic, options)
    advantages = train_critic(critic, samples, rewards, options)
    train_policy(
        actor,
        samples,
        advantages_of_actor(advantages, critic, options),
        logprobs,
        examples=learnt_beside(examples, options),
        after=options.critic_warmup_steps,
        weigh_kl=options.weigh_kl_by_ratio,
    )


def shaped_scores(given: Scores, samples: Generated, options: PPOOptions) -> ColumnHandle:
    """Scores normalised, then clipped, then less the penalty of truncated ones; with `credit: turn`, which has no
    other shapes, the penalty is at the last token."""
    scores = credited(given, options)
    if options.reward_norm is not RewardNorm.NONE:
        moments = carried("reward_moments", (0.0, 0.0, 0.0))
        updated = per_batch(updated_moments, moments, scores, name="next_reward_moments", level=Level.BATCH)
        moments.becomes(updated)
        centre = options.reward_norm is RewardNorm.MEAN_STD
        scores = per_sample(normalised, scores, updated, name="normalised_scores", centre=centre)
    if options.reward_clip is not None:
        scores = per_sample(clipped, scores, name="clipped_scores", limit=options.reward_clip)
    if options.missing_eos_penalty > 0:
        scores = per_sample(
            turns_less_if_truncated if options.credit is Credit.TURN else less_if_truncated,
            scores,
            samples.finished,
            name="penalised_scores",
            level=scores.column.level,
            penalty=options.missing_eos_penalty,
        )
    return scores


def shaped_rewards(
    samples: Generated,
    scores: ColumnHandle,
    logprobs: PolicyLogprobs,
    critic: Role,
    options: PPOOptions,
    *,
    kl_share: float = 1.0,
) -> ColumnHandle:
    """The reward of each token, which the critic learns the sum of: its share of the KL, and the score at the last."""
    rewards = token_rewards(samples, scores, logprobs, options, role=critic.name, share=kl_share)
    if options.whiten_rewards:
        rewards = per_batch(scaled, rewards, name="whitened_rewards", level=Level.TOKEN)
    return rewards


def advantages_of_actor(advantages: ColumnHandle, critic: Role, options: PPOOptions) -> ColumnHandle:
    """As the actor is trained on them, whitened if asked; the metric `{critic}/advantages/mean`."""
    if options.whiten_advantages:
        advantages = per_batch(whitened, advantages, name="advantages", level=Level.TOKEN)
    per_batch(token_mean, advantages, name=f"{critic.name}/advantages/mean", level=Level.BATCH)
    return advantages


def updated_moments(moments: FloatArray, scores: FloatArray) -> FloatArray:
    """Count, mean and sum of squared deviations of all scores so far and of these (Chan, Golub & LeVeque 1979).

    [3], [samples] → [3]. The batch counts in what it is normalised by, as in TRL's `use_score_scaling`.
    """
    count, mean, squares = moments
    if not len(scores):
        return moments
    total = count + len(scores)
    shift = scores.mean() - mean
    squares += ((scores - scores.mean()) ** 2).sum() + shift**2 * count * len(scores) / total
    return np.array([total, mean + shift * len(scores) / total, squares])


def normalised(score: float, moments: FloatArray, centre: bool) -> float:
    """score / (std + 1e-8), with `centre` (score − mean) / (std + 1e-8); the deviation has ddof 1.

    Divided by 1 while there are no two different scores.
    """
    count, mean, squares = moments
    deviation = float(np.sqrt(squares / (count - 1))) + 1e-8 if squares > 0 else 1.0
    return (score - mean if centre else score) / deviation


def clipped(score: float, limit: float) -> float:
    return min(max(score, -limit), limit)


def less_if_truncated(score: float, finished: float, penalty: float) -> float:
    """TRL's `missing_eos_penalty`."""
    return score if finished else score - penalty


def turns_less_if_truncated(scores: FloatArray, finished: float, penalty: float) -> FloatArray:
    """The same at the last token. [tokens] → [tokens]."""
    return scores if finished else scores - at_last_token(penalty, scores)

"""GRPO: group-relative policy optimisation (Shao et al. 2024, DeepSeekMath, §4.1), and its relatives by options.

Several responses are drawn per prompt; a response's advantage is its reward against those of its siblings, so no
critic is needed. The loss is PPO's clipped surrogate, or one of those that take its place, with a KL penalty to the
reference in the loss or in the reward. DAPO, Dr. GRPO, GSPO and CISPO are settings of the options below;
`docs/algorithms.md` lists them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from plait.algorithms.advantages import EPSILON, FloatArray, centred, standardised
from plait.algorithms.groups import ResponseOptions, generate_groups, kept_in_loss, shaped_scores
from plait.algorithms.kl import KLPlace
from plait.algorithms.losses import Aggregation, KLEstimator
from plait.algorithms.policy import learnt_beside, policy_logprobs, train_policy
from plait.dataflow import Given, Prompts, Role, per_batch, per_group
from plait.dataflow.handles import ColumnHandle, Scores


class Objectives(StrEnum):
    """How several rewards become one advantage, by TRL's names."""

    SUM = "sum_then_normalize"
    NORMALIZE = "normalize_then_sum"


class GRPOOptions(ResponseOptions):
    takes_k1_in_loss: ClassVar[bool] = True

    kl_estimator: KLEstimator = Field(
        default=KLEstimator.K3, description="k1 (in the loss its gradient averages to 0 unless weighed), k2 or k3"
    )
    kl_in: KLPlace = Field(default=KLPlace.LOSS, description="loss, or reward (subtracted from each sample's score)")
    clip_high: float = Field(
        default=0.2, gt=0, description="upper clip of the probability ratio (DAPO: 0.28), in gmpo of its logarithm"
    )
    aggregation: Aggregation = Field(
        default=Aggregation.SEQUENCE_MEAN, description="seq-mean-token-mean, token-mean or seq-mean-token-sum-norm"
    )
    scale_rewards: bool | Literal["batch"] = Field(
        default=True,
        description="true: divide advantages by the standard deviation of the group's rewards; batch: of all rewards "
        "of the batch; false: do not",
    )
    multi_objective_aggregation: Objectives = Field(
        default=Objectives.SUM,
        description="of several rewards: sum_then_normalize, or normalize_then_sum (GDPO: each by itself within the "
        "group, then their weighted sum over the batch)",
    )

    @field_validator("scale_rewards", mode="before")
    @classmethod
    def _is_scale(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value != "batch":
            trl = {"group": "; TRL's `group` is true", "none": "; TRL's `none` is false"}
            raise ValueError(f"expected true, batch or false, found {value!r:.40}{trl.get(str(value), '')}")
        return value

    @model_validator(mode="after")
    def _check_objectives(self) -> Self:
        if self.multi_objective_aggregation is Objectives.SUM:
            return self
        of_the_sum = {
            "scale_rewards": self.scale_rewards is not True,
            "dynamic_sampling": self.dynamic_sampling,
            "stop_properly_penalty_coef": self.stop_properly_penalty_coef is not None,
            "overlong_buffer_tokens": self.overlong_buffer_tokens > 0,
            "kl_in": self.kl_coef > 0 and self.kl_in is KLPlace.REWARD,
        }
        if found := [key for key, is_set in of_the_sum.items() if is_set]:
            raise ValueError(
                f"{found[0]}: {getattr(self, found[0])} is about the sum of rewards, but multi_objective_aggregation: "
                f"normalize_then_sum standardises each by itself; remove `options.{found[0]}` or set "
                "`options.multi_objective_aggregation` to sum_then_normalize"
            )
        return self


def grpo(
    prompts: Prompts,
    actor: Role,
    reward: Role,
    options: GRPOOptions,
    ref: Role | None = None,
    examples: Given | None = None,
) -> None:
    """The flow. The reference is called only when `kl_coef` > 0, examples are read only when `ptx_coef` > 0."""
    samples = generate_groups(actor, prompts, reward, options)
    scores = reward.score(samples)
    rewards = shaped_scores(scores, samples, options)
    logprobs = policy_logprobs(actor, ref, samples, options, options.kl_in)
    rewards = logprobs.off_score(rewards)
    advantages = _advantages(scores, rewards, options)
    train_policy(
        actor,
        samples,
        advantages,
        logprobs,
        examples=learnt_beside(examples, options),
        ratio=options.ratio,
        keep=kept_in_loss(samples, options),
        weigh_kl=options.weigh_kl_by_ratio,
    )


def _advantages(scores: Scores, rewards: ColumnHandle, options: GRPOOptions) -> ColumnHandle:
    """
    Args:
        rewards: the scores, less what they are lowered by.
    """
    if options.multi_objective_aggregation is Objectives.NORMALIZE:
        return per_batch(standardised, scores.decoupled, name="advantages", least_samples=2, epsilon=EPSILON)
    if options.scale_rewards == "batch":
        centred_rewards = per_group(centred, rewards, name="centred_rewards", least_samples=2)
        return per_batch(batch_advantages, centred_rewards, rewards, name="advantages")
    return per_group(group_advantages, rewards, name="advantages", least_samples=2, scale=options.scale_rewards)


def group_advantages(rewards: FloatArray, scale: bool = True) -> FloatArray:
    """A_i = (r_i − mean r) / (std r + ε), the sample standard deviation (ddof 1) as in the published code.

    A group of one sample, or of equal rewards, gets advantages of exactly 0.
    """
    return standardised(rewards, EPSILON) if scale else centred(rewards)


def batch_advantages(centred_rewards: FloatArray, rewards: FloatArray) -> FloatArray:
    """A_i = (r_i − mean r of its group) / (std r of the batch + ε) (Liu et al. 2025, Lite PPO, arXiv 2508.08221):
    groups of nearly equal rewards are not scaled up to those of the others.

    Args:
        centred_rewards: [samples], r_i less the mean of its group.
        rewards: [samples].
    """
    return centred_rewards / (rewards.std(ddof=1) + EPSILON) if len(rewards) > 1 else np.zeros_like(rewards)

"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): no critic, advantages normalised over the whole batch.

The return of a token is the response's score less the KL from that token on (k1 in the reward); all returns of the
batch's tokens are standardised together, with no group statistics, so one response per prompt is enough. With
`group_baseline` the score is first reduced by the mean of its group (REINFORCE++ w/ baseline, for several responses per
prompt; the paper then puts the KL into the loss, as k2). The loss is PPO's clipped surrogate per token.
"""

from __future__ import annotations

from typing import Self

import numpy as np
from pydantic import Field, model_validator

from plait.algorithms.advantages import FloatArray, centred, whitened
from plait.algorithms.groups import GroupOptions, generate_groups, kept_in_loss, shaped_scores
from plait.algorithms.policy import learnt_beside, policy_logprobs, train_policy
from plait.dataflow import Given, Level, Prompts, Role, per_batch, per_group, per_sample


class ReinforcePPOptions(GroupOptions):
    group_baseline: bool = Field(
        default=False, description="subtract the mean score of the group first (the -baseline variant)"
    )

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.dynamic_sampling and not self.group_baseline:
            raise ValueError(
                "dynamic_sampling leaves out groups of equal scores, which teach nothing where a group is its own "
                "baseline, but the baseline is the batch, and to leave them out would be a bias; set "
                "`options.group_baseline` to true or `options.dynamic_sampling` to false"
            )
        return self


def reinforce_pp(
    prompts: Prompts,
    actor: Role,
    reward: Role,
    options: ReinforcePPOptions,
    ref: Role | None = None,
    examples: Given | None = None,
) -> None:
    """The flow. The reference is called only when `kl_coef` > 0, examples are read only when `ptx_coef` > 0."""
    samples = generate_groups(actor, prompts, reward, options)
    scores = shaped_scores(reward.score(samples), samples, options)
    if options.group_baseline:
        scores = per_group(centred, scores, name="centred_scores", least_samples=2)
    logprobs = policy_logprobs(actor, ref, samples, options, options.kl_in)
    if logprobs.in_reward:
        returns = logprobs.to_go(scores, "returns")
    else:
        returns = per_sample(at_each_token, scores, samples.logprobs, name="returns", level=Level.TOKEN)
    advantages = per_batch(whitened, returns, name="advantages", level=Level.TOKEN)
    train_policy(
        actor,
        samples,
        advantages,
        logprobs,
        examples=learnt_beside(examples, options),
        keep=kept_in_loss(samples, options),
        weigh_kl=options.weigh_kl_by_ratio,
    )


def at_each_token(score: float, logprobs: FloatArray) -> FloatArray:
    """The undiscounted return of each token where all reward is given at the end. [tokens]."""
    return np.full(len(logprobs), score)

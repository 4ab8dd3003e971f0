"""ReMax: REINFORCE with the reward of the greedy response as the baseline (Li et al. 2023, arXiv 2310.10505).

Beside the samples, one response per prompt is decoded greedily; an advantage is the score of a sample less the score of
that response. It needs neither a critic nor several samples per prompt. The KL is in the reward of each token.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from plait.algorithms.advantages import FloatArray
from plait.algorithms.kl import KLPlace
from plait.algorithms.losses import Aggregation, KLEstimator
from plait.algorithms.options import PolicyOptions
from plait.algorithms.policy import policy_logprobs, train_policy
from plait.dataflow import Given, Prompts, Role, per_group


class ReMaxOptions(PolicyOptions):
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL in the reward; 0 needs no reference")
    kl_estimator: KLEstimator = Field(default=KLEstimator.K1, description="k1, k2 or k3")
    aggregation: Aggregation = Field(
        default=Aggregation.CONSTANT, description="seq-mean-token-sum-norm, token-mean or seq-mean-token-mean"
    )


def remax(
    prompts: Prompts, examples: Given, actor: Role, reward: Role, options: ReMaxOptions, ref: Role | None = None
) -> None:
    """The flow: two rollouts of the same weights. The reference is called only when `kl_coef` > 0, examples are read
    only when `ptx_coef` > 0."""
    samples = actor.generate(prompts)
    greedy = actor.generate(prompts, greedy=True, samples_per_prompt=1)
    advantages = per_group(over_greedy, reward.score(samples), reward.score(greedy), name="score_over_greedy")
    logprobs = policy_logprobs(actor, ref, samples, options, KLPlace.REWARD)
    train_policy(actor, samples, logprobs.to_go(advantages, "advantages"), logprobs, examples=examples)


def over_greedy(scores: FloatArray, greedy_scores: FloatArray) -> FloatArray:
    """A_i = r_i − r_greedy of the same prompt: [samples], [1] → [samples].

    Where the greedy response lost its reward ([0]) there is no baseline, and the prompt teaches nothing: 0.
    """
    return scores - greedy_scores[0] if len(greedy_scores) else np.zeros_like(scores)

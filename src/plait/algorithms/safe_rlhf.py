"""Safe-RLHF: the most reward under a limit on cost (Dai et al. 2023, arXiv 2310.12773).

max E[r] subject to E[c] ≤ d, as max over the policy of min over λ ≥ 0 of E[r] − λ (E[c] − d). PPO with two scores and
two critics; the multiplier λ grows while the mean cost is above the limit d and falls while it is below. The advantage
is (A_r − λ A_c) / (1 + λ), so that its size does not depend on λ; half of the KL is taken off the reward and half is
put on the cost, so that its weight does not either.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from plait.algorithms.advantages import FloatArray
from plait.algorithms.critic import credited, token_rewards, train_critic
from plait.algorithms.losses import cross_entropy
from plait.algorithms.policy import policy_logprobs, train_policy
from plait.algorithms.ppo import PPOOptions, advantages_of_actor, shaped_rewards, shaped_scores
from plait.dataflow import Given, Level, Prompts, Role, carried, per_batch, per_sample
from plait.dataflow.handles import ColumnHandle

MOST_LOG_LAMBDA = 40.0
"""λ = e⁴⁰ where `lambda_max` sets no bound: (A_r − λ A_c) / (1 + λ) is −A_c there, to the last bit of float64."""


class SafeRLHFOptions(PPOOptions):
    kl_coef: float = Field(default=0.02, ge=0, description="weight of the KL to the reference, half of it in the cost")
    value_clip: float | None = Field(
        default=5.0, gt=0, description="a value counts at most this far from what it was; null: it is not clipped"
    )
    whiten_advantages: bool = Field(
        default=False, description="standardise the combined advantages over the batch's tokens"
    )
    cost_threshold: float = Field(default=0.0, description="the limit d on the mean cost")
    lambda_init: float = Field(
        default=1.0, gt=0, description="the multiplier in the first step, before its first update"
    )
    lambda_lr: float = Field(default=0.1, ge=0, description="learning rate of the multiplier's logarithm")
    lambda_max: float | None = Field(default=5.0, gt=0, description="the largest multiplier; null: there is none")
    cost_window: int = Field(default=128, ge=1, description="number of last responses that the mean cost is taken over")
    ptx_coef: float = Field(
        default=0.0,
        ge=0,
        description="weight of the cross entropy on given examples, in optimizer steps of its own; 0: none is trained",
    )

    @model_validator(mode="after")
    def _check_lambda(self) -> Self:
        if self.lambda_max is not None and self.lambda_init > self.lambda_max:
            raise ValueError(
                f"lambda_init is {self.lambda_init}, above lambda_max, {self.lambda_max}; set `options.lambda_init` to "
                "at most that"
            )
        return self


def safe_rlhf(
    prompts: Prompts,
    examples: Given,
    actor: Role,
    critic: Role,
    cost_critic: Role,
    reward: Role,
    cost: Role,
    options: SafeRLHFOptions,
    ref: Role | None = None,
) -> None:
    """The flow. The reference is called only when `kl_coef` > 0, examples are read only when `ptx_coef` > 0."""
    samples = actor.generate(prompts)
    costs = cost.score(samples)
    multiplier = lagrange_multiplier(costs, options)
    scores = shaped_scores(reward.score(samples), samples, options)
    logprobs = policy_logprobs(actor, ref, samples, options, options.kl_in)
    rewards = shaped_rewards(samples, scores, logprobs, critic, options, kl_share=0.5)
    token_costs = token_rewards(samples, credited(costs, options), logprobs, options, role=cost_critic.name, share=-0.5)
    advantages = per_sample(
        combined,
        train_critic(critic, samples, rewards, options),
        train_critic(cost_critic, samples, token_costs, options),
        multiplier,
        name="lagrangian_advantages",
        level=Level.TOKEN,
    )
    train_policy(
        actor,
        samples,
        advantages_of_actor(advantages, critic, options),
        logprobs,
        after=options.critic_warmup_steps,
        weigh_kl=options.weigh_kl_by_ratio,
    )
    if options.ptx_coef > 0:
        actor.train(
            examples,
            loss=partial(cross_entropy, coef=options.ptx_coef, name="actor/ptx_loss"),
            mask=examples.trained,
            mini_batches=options.mini_batches,
            after=options.critic_warmup_steps,
        )


def lagrange_multiplier(costs: ColumnHandle, options: SafeRLHFOptions) -> ColumnHandle:
    """λ of this step, after its update by this step's costs; the metric `lambda`. `episode_cost` is what it saw.

    As in the paper's code, the mean is over a window of the last `cost_window` responses.
    """
    window = carried("cost_window", (0.0,) * (options.cost_window + 1))
    costs_seen = per_batch(last_costs, window, costs, name="next_cost_window", level=Level.BATCH)
    window.becomes(costs_seen)
    log_lambda = carried("log_lambda", math.log(options.lambda_init))
    updated = per_batch(
        updated_log_lambda,
        log_lambda,
        per_batch(window_mean, costs_seen, name="episode_cost", level=Level.BATCH),
        name="next_log_lambda",
        level=Level.BATCH,
        threshold=options.cost_threshold,
        rate=options.lambda_lr,
        largest=MOST_LOG_LAMBDA if options.lambda_max is None else min(MOST_LOG_LAMBDA, math.log(options.lambda_max)),
    )
    log_lambda.becomes(updated)
    return per_batch(exponential, updated, name="lambda", level=Level.BATCH)


def last_costs(window: FloatArray, costs: FloatArray) -> FloatArray:
    """The number of costs in the window, then these, the newest last, then zeros. [w + 1], [samples] → [w + 1]."""
    size = len(window) - 1
    kept = np.concatenate([window[1 : 1 + int(window[0])], costs])[-size:]
    return np.concatenate([[len(kept)], kept, np.zeros(size - len(kept))])


def window_mean(window: FloatArray) -> float:
    """0 for an empty window."""
    return float(window[1 : 1 + int(window[0])].sum() / max(1.0, window[0]))


def updated_log_lambda(log_lambda: float, mean_cost: float, *, threshold: float, rate: float, largest: float) -> float:
    """ln λ' = ln λ + rate · λ · (mean cost − threshold): a gradient step in ln λ, which keeps λ > 0 (eq. 31)."""
    return min(log_lambda + rate * math.exp(log_lambda) * (mean_cost - threshold), largest)


def exponential(logarithm: float) -> float:
    return math.exp(logarithm)


def combined(reward_advantages: FloatArray, cost_advantages: FloatArray, multiplier: float) -> FloatArray:
    """(A_r − λ A_c) / (1 + λ). [tokens]."""
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)

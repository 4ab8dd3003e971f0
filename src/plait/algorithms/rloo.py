"""RLOO: REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, "Back to Basics", arXiv 2402.14740).

A response is one action: its advantage is its reward less the mean reward of its siblings, which does not depend on it,
so the gradient is unbiased. The KL to the reference is in the reward (k1, as in the paper) or in the loss. The default
loss is TRL's: the clipped surrogate of the ratio of whole responses, averaged over responses; where a batch is used
once it is plain REINFORCE. `ratio: token` gives the token-wise loss of verl and OpenRLHF.
"""

from __future__ import annotations

from pydantic import Field

from plait.algorithms.advantages import EPSILON, FloatArray, centred, standardised
from plait.algorithms.groups import ResponseOptions, generate_groups, kept_in_loss, shaped_scores
from plait.algorithms.losses import Aggregation
from plait.algorithms.policy import learnt_beside, policy_logprobs, train_policy
from plait.algorithms.surrogates import Ratio
from plait.dataflow import Given, Prompts, Role, per_batch, per_group


class RLOOOptions(ResponseOptions):
    normalize_advantages: bool = Field(default=False, description="standardise advantages over the batch")
    ratio: Ratio = Field(default=Ratio.SEQUENCE_PRODUCT, description="sequence-product, sequence-mean or token")
    aggregation: Aggregation = Field(
        default=Aggregation.SEQUENCE_MEAN, description="seq-mean-token-mean, token-mean or seq-mean-token-sum-norm"
    )


def rloo(
    prompts: Prompts,
    actor: Role,
    reward: Role,
    options: RLOOOptions,
    ref: Role | None = None,
    examples: Given | None = None,
) -> None:
    """The flow. The reference is called only when `kl_coef` > 0, examples are read only when `ptx_coef` > 0."""
    samples = generate_groups(actor, prompts, reward, options)
    rewards = shaped_scores(reward.score(samples), samples, options)
    logprobs = policy_logprobs(actor, ref, samples, options, options.kl_in)
    rewards = logprobs.off_score(rewards)
    advantages = per_group(leave_one_out_advantages, rewards, name="advantages", least_samples=2)
    if options.normalize_advantages:
        advantages = per_batch(standardised, advantages, name="normalized_advantages", epsilon=EPSILON)
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


def leave_one_out_advantages(rewards: FloatArray) -> FloatArray:
    """A_i = r_i − mean of the other n − 1 rewards of the group, which is n / (n − 1) · (r_i − mean r).

    A group of one sample has no baseline and gets 0, as do equal rewards.
    """
    return centred(rewards) * len(rewards) / max(1, len(rewards) - 1)

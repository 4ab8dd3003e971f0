"""Reward model: a score for each response, from pairs of which one was preferred (Bradley & Terry 1952).

P(chosen ≻ rejected) = σ(s_chosen − s_rejected) (Stiennon et al. 2020, arXiv 2009.01325, §3.4). The score is read at the
last token of the response. Only differences are learnt: `center_rewards_coefficient` keeps their sum near 0.
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from plait.algorithms.losses import LossBatch, Tensor, minus_log_sigmoid
from plait.algorithms.options import UpdateOptions
from plait.dataflow import Given, Role


class RewardModelOptions(UpdateOptions):
    margin: float = Field(0.0, ge=0, description="by how much the chosen score should be the higher one")
    center_rewards_coefficient: float = Field(
        0.0, ge=0, description="weight of (s_chosen + s_rejected)², which centres scores at 0 (0.01)"
    )


def reward_model(pairs: Given, reward: Role, options: RewardModelOptions) -> None:
    """The flow. A pair is never split."""
    reward.train(
        pairs,
        loss=partial(bradley_terry_loss, options=options, role=reward.name),
        whole_groups=True,
        mini_batches=options.mini_batches,
        epochs=options.epochs,
    )


def bradley_terry_loss(batch: LossBatch, *, options: RewardModelOptions, role: str = "reward") -> Tensor:
    """Mean over pairs of −log σ(s_chosen − s_rejected − margin) + c · (s_chosen + s_rejected)².

    The centring term is that of Eisenstein et al. 2023 (arXiv 2312.09244, eq. 2). Logs per pair: `{role}/accuracy` (a
    tie is wrong), `{role}/margin` = s_chosen − s_rejected and `{role}/mean_reward`, the mean of both scores.
    """
    chosen_P, rejected_P = batch.pairs(batch.scores)
    difference_P, sum_P = chosen_P - rejected_P, chosen_P + rejected_P
    batch.log(f"{role}/accuracy", (difference_P > 0).to(difference_P.dtype), per="pair")
    batch.log(f"{role}/margin", difference_P, per="pair")
    batch.log(f"{role}/mean_reward", sum_P / 2, per="pair")
    loss_P = minus_log_sigmoid(difference_P - options.margin) + options.center_rewards_coefficient * sum_P**2
    return batch.mean_over_pairs(loss_P)

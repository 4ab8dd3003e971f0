"""Reward model: a score for each response, from pairs of which one was preferred (Bradley & Terry 1952).

P(chosen ≻ rejected) = σ(s_chosen − s_rejected) (Stiennon et al. 2020, arXiv 2009.01325, §3.4). The score is read at the
last token of the response. Only differences are learnt: `center_rewards_coefficient` keeps their sum near 0.
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from plait.algorithms.losses import LossBatch, Tensor, is_higher, minus_log_sigmoid, of_samples
from plait.algorithms.options import UpdateOptions
from plait.dataflow import Given, Role


class RewardModelOptions(UpdateOptions):
    margin: float = Field(
        default=0.0,
        ge=0,
        description="by how much the chosen score should be the higher one; a column `margin` adds to it",
    )
    center_rewards_coefficient: float = Field(
        default=0.0, ge=0, description="weight of (s_chosen + s_rejected)², which centres scores at 0 (0.01)"
    )


def reward_model(pairs: Given, reward: Role, options: RewardModelOptions) -> None:
    """The flow. A pair is never split."""
    reward.train(
        pairs,
        loss=partial(bradley_terry_loss, options=options, role=reward.name),
        margin=pairs.margin,
        whole_groups=True,
        mini_batches=options.mini_batches,
        epochs=options.epochs,
    )


def bradley_terry_loss(
    batch: LossBatch, margin: Tensor | None = None, *, options: RewardModelOptions, role: str
) -> Tensor:
    """Mean over pairs of −log σ(s_chosen − s_rejected − m) + c · (s_chosen + s_rejected)², m = `options.margin` and the
    pair's own `margin` [R] (Touvron et al. 2023, Llama 2, arXiv 2307.09288, eq. 2).

    The centring term is that of Eisenstein et al. 2023 (arXiv 2312.09244, eq. 2). Logs per pair: `{role}/accuracy` (a
    tie, up to rounding, is wrong), `{role}/margin` = s_chosen − s_rejected and `{role}/mean_reward`, the mean of both
    scores.
    """
    chosen_P, rejected_P = batch.pairs(batch.scores)
    difference_P, sum_P = chosen_P - rejected_P, chosen_P + rejected_P
    batch.log(f"{role}/accuracy", is_higher(chosen_P, rejected_P, chosen_P.abs() + rejected_P.abs()), per="pair")
    batch.log(f"{role}/margin", difference_P, per="pair")
    batch.log(f"{role}/mean_reward", sum_P / 2, per="pair")
    margin_P = options.margin if margin is None else options.margin + batch.pairs(of_samples(batch, margin))[0]
    loss_P = minus_log_sigmoid(difference_P - margin_P) + options.center_rewards_coefficient * sum_P**2
    return batch.mean_over_pairs(loss_P)

"""DPO: learning from preferences without a reward model (Rafailov et al. 2023, arXiv 2305.18290), and its relatives.

The policy's own log-ratio to the reference is the reward: r(x, y) = β log π(y | x) / π_ref(y | x), up to a constant of
the prompt. Pairs are then fitted as in a reward model. Log-probs of a response are sums over its tokens.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Self

from pydantic import Field, model_validator

from plait.algorithms.losses import LossBatch, Tensor, is_higher, minus_log_sigmoid
from plait.algorithms.options import UpdateOptions
from plait.dataflow import Given, Role
from plait.errors import FlowError


class DPOLoss(StrEnum):
    """With h = log-ratio of the chosen response − log-ratio of the rejected one, ε the label smoothing."""

    SIGMOID = "sigmoid"
    """−(1 − ε) log σ(β h) − ε log σ(−β h) (Rafailov et al. 2023, eq. 7; ε: conservative DPO, Mitchell 2023)."""
    ROBUST = "robust"
    """(−(1 − ε) log σ(β h) + ε log σ(−β h)) / (1 − 2ε), unbiased under labels flipped at rate ε (Ray Chowdhury et al.
    2024, arXiv 2403.00409)."""
    HINGE = "hinge"
    """max(0, 1 − β h) (SLiC, Zhao et al. 2023, arXiv 2305.10425)."""
    IPO = "ipo"
    """(h̄ − 1 / 2β)², with log-ratios averaged over tokens (Azar et al. 2023, arXiv 2310.12036, eq. 17)."""


class DPOOptions(UpdateOptions):
    beta: float = Field(
        default=0.1, gt=0, description="weight of the KL to the reference that is implied; for ipo its τ"
    )
    loss_type: DPOLoss = Field(default=DPOLoss.SIGMOID, description="sigmoid, robust, hinge or ipo")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="share of labels taken to be wrong (sigmoid and robust)"
    )
    reference_free: bool = Field(default=False, description="a uniform reference; needs no reference role")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.label_smoothing and self.loss_type not in (DPOLoss.SIGMOID, DPOLoss.ROBUST):
            raise ValueError(
                f"label_smoothing has no effect with loss_type: {self.loss_type}; set `options.label_smoothing` to 0 "
                "or `options.loss_type` to sigmoid or robust"
            )
        return self


def dpo(pairs: Given, actor: Role, options: DPOOptions, ref: Role | None = None) -> None:
    """The flow. The reference is called unless `reference_free`. A pair is never split.

    Raises:
        FlowError: nothing fills the role `ref`, and the options need it.
    """
    if ref is None and not options.reference_free:
        raise FlowError(
            "dpo needs the role `ref`, which nothing fills; give a reference or set options.reference_free to true"
        )
    actor.train(
        pairs,
        loss=partial(dpo_loss, options=options),
        mask=pairs.trained,
        whole_groups=True,
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        ref_logprobs=None if ref is None or options.reference_free else ref.logprobs(pairs),
    )


def dpo_loss(batch: LossBatch, *, options: DPOOptions, ref_logprobs: Tensor | None = None) -> Tensor:
    """Mean over pairs of the loss named by `loss_type`, see `DPOLoss`.

    Logs per pair, under TRL's names: `rewards/chosen` and `rewards/rejected` = β · log-ratio, `rewards/accuracies` (a
    tie, up to rounding, is wrong), `rewards/margins`, `logps/chosen` and `logps/rejected`.

    Args:
        ref_logprobs: [R]; None: the reference is uniform.
    """
    logprobs_N = batch.per_sequence(batch.logprobs)
    ratios_N = logprobs_N if ref_logprobs is None else batch.per_sequence(batch.logprobs - ref_logprobs)
    chosen_P, rejected_P = batch.pairs(ratios_N)
    _log_pairs(batch, logprobs_N, chosen_P, rejected_P, options.beta)
    logits_P = options.beta * (chosen_P - rejected_P)
    smoothing = options.label_smoothing
    match options.loss_type:
        case DPOLoss.SIGMOID:
            loss_P = (1 - smoothing) * minus_log_sigmoid(logits_P) + smoothing * minus_log_sigmoid(-logits_P)
        case DPOLoss.ROBUST:
            loss_P = (1 - smoothing) * minus_log_sigmoid(logits_P) - smoothing * minus_log_sigmoid(-logits_P)
            loss_P = loss_P / (1 - 2 * smoothing)
        case DPOLoss.HINGE:
            loss_P = (1 - logits_P).clamp(min=0)
        case DPOLoss.IPO:
            lengths_N = batch.per_sequence(batch.mask).clamp(min=1)
            chosen_P, rejected_P = batch.pairs(ratios_N / lengths_N)
            loss_P = (chosen_P - rejected_P - 1 / (2 * options.beta)) ** 2
    return batch.mean_over_pairs(loss_P)


def _log_pairs(batch: LossBatch, logprobs_N: Tensor, chosen_P: Tensor, rejected_P: Tensor, beta: float) -> None:
    rewards = {"rewards/chosen": beta * chosen_P, "rewards/rejected": beta * rejected_P}
    rewards["rewards/margins"] = beta * (chosen_P - rejected_P)
    of_chosen_P, of_rejected_P = batch.pairs(logprobs_N)
    # Log-ratios to a reference that the policy still equals are differences of these, and zero but for rounding.
    rewards["rewards/accuracies"] = is_higher(chosen_P, rejected_P, of_chosen_P.abs() + of_rejected_P.abs())
    rewards["logps/chosen"], rewards["logps/rejected"] = of_chosen_P, of_rejected_P
    for name, values_P in rewards.items():
        batch.log(name, values_P, per="pair")

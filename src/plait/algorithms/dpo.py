"""DPO: learning from preferences without a reward model (Rafailov et al. 2023, arXiv 2305.18290), and its relatives.

The policy's own log-ratio to the reference is the reward: r(x, y) = β log π(y | x) / π_ref(y | x), up to a constant of
the prompt. Pairs are then fitted as in a reward model. Log-probs of a response are sums over its tokens.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import partial
from typing import Self

from pydantic import Field, model_validator

from plait.algorithms.losses import LossBatch, Tensor, is_higher, minus_log_sigmoid
from plait.algorithms.options import UpdateOptions
from plait.dataflow import Given, Role
from plait.errors import FlowError

Pair = tuple[Tensor, Tensor]
"""[P], [P]: numbers of the chosen and of the rejected response of each pair."""


class DPOLoss(StrEnum):
    """The loss of a pair of responses, c chosen and r rejected. ρ is a response's log-ratio Σ_t log π − log π_ref,
    h = ρ_c − ρ_r, and h̄ is h of log-ratios averaged over tokens; ε is the label smoothing, m the margin."""

    SIGMOID = "sigmoid"
    """−(1 − ε) log σ(β h − m) − ε log σ(m − β h) (Rafailov et al. 2023, eq. 7; ε: conservative DPO, Mitchell 2023;
    m: Amini et al. 2024, arXiv 2402.10571)."""
    SIGMOID_NORM = "sigmoid_norm"
    """The same of h̄: length-normalised DPO (Tülu 3, Lambert et al. 2024, arXiv 2411.15124). Reference-free and with a
    margin it is SimPO (Meng et al. 2024, arXiv 2405.14734, eq. 6)."""
    ROBUST = "robust"
    """(−(1 − ε) log σ(β h) + ε log σ(−β h)) / (1 − 2ε), unbiased under labels flipped at rate ε (Ray Chowdhury et al.
    2024, arXiv 2403.00409)."""
    HINGE = "hinge"
    """max(0, 1 − β h) (SLiC, Zhao et al. 2023, arXiv 2305.10425)."""
    IPO = "ipo"
    """(h̄ − 1 / 2β)² (Azar et al. 2023, arXiv 2310.12036, eq. 17)."""
    EXO_PAIR = "exo_pair"
    """KL((σ(β h), σ(−β h)) ‖ (1 − ε, ε)) (Ji et al. 2024, arXiv 2402.00856, eq. 16)."""
    NCA_PAIR = "nca_pair"
    """−log σ(β ρ_c) − ½ log σ(−β ρ_c) − ½ log σ(−β ρ_r) (Chen et al. 2024, arXiv 2402.05369)."""
    BCO_PAIR = "bco_pair"
    """−log σ(β ρ_c) − log σ(−β ρ_r) (Jung et al. 2024, arXiv 2404.04656, with a reward shift of 0, as in TRL)."""
    SPPO_HARD = "sppo_hard"
    """(ρ_c − 1 / 2β)² + (ρ_r + 1 / 2β)² (Wu et al. 2024, arXiv 2405.00675, eq. 4.7, with probabilities of 1 and 0)."""
    APO_ZERO = "apo_zero"
    """1 − σ(β ρ_c) + σ(β ρ_r) (D'Oosterlinck et al. 2024, arXiv 2408.06266, eq. 7)."""
    APO_DOWN = "apo_down"
    """σ(β ρ_c) + 1 − σ(β h) (the same, eq. 8)."""
    ORPO = "orpo"
    """−β log σ(log odds_c − log odds_r), where odds = p / (1 − p) of p = exp(mean_t log π); with `nll_coef: 1` it is
    ORPO with λ = β (Hong et al. 2024, arXiv 2403.07691, eq. 6, 7)."""


AVERAGED = (DPOLoss.SIGMOID_NORM, DPOLoss.IPO, DPOLoss.ORPO)
"""Losses of log-ratios averaged over the tokens of a response; the others take sums."""
SMOOTHED = (DPOLoss.SIGMOID, DPOLoss.SIGMOID_NORM, DPOLoss.ROBUST, DPOLoss.EXO_PAIR)
"""Losses that heed `label_smoothing`."""
WITH_MARGIN = (DPOLoss.SIGMOID, DPOLoss.SIGMOID_NORM)
"""Losses that heed `margin`."""


class DPOOptions(UpdateOptions):
    beta: float = Field(
        default=0.1,
        gt=0,
        description="weight of the KL to the reference that is implied; for ipo its τ, for orpo its λ",
    )
    loss_type: DPOLoss = Field(default=DPOLoss.SIGMOID, description=", ".join(DPOLoss))
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description=f"share of labels taken to be wrong ({', '.join(SMOOTHED)})"
    )
    reference_free: bool = Field(default=False, description="a uniform reference; needs no reference role")
    margin: float = Field(
        default=0.0,
        ge=0,
        description="by how much β times the log-ratio of the chosen response should be the higher one "
        f"({', '.join(WITH_MARGIN)}); SimPO's γ",
    )
    nll_coef: float = Field(
        default=0.0, ge=0, description="weight of the chosen response's −log π, averaged over its tokens"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, value, losses in (
            ("label_smoothing", self.label_smoothing, SMOOTHED),
            ("margin", self.margin, WITH_MARGIN),
        ):
            if value and self.loss_type not in losses:
                raise ValueError(
                    f"{name} has no effect with loss_type: {self.loss_type}; set `options.{name}` to 0 or "
                    f"`options.loss_type` to {', '.join(losses[:-1])} or {losses[-1]}"
                )
        if self.loss_type is DPOLoss.EXO_PAIR and not self.label_smoothing:
            raise ValueError(
                "exo_pair compares with labels that may be wrong, and label_smoothing is 0; set "
                "`options.label_smoothing` to a small share, as 1e-3"
            )
        if self.loss_type is DPOLoss.ORPO and not self.reference_free:
            raise ValueError("orpo compares with no reference; set `options.reference_free` to true")
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
    """Mean over pairs of the loss named by `loss_type`, see `DPOLoss`, and of `nll_coef` times the chosen response's
    −log π averaged over its tokens (Pang et al. 2024, arXiv 2404.19733, eq. 1).

    Logs per pair, under TRL's names: `rewards/chosen` and `rewards/rejected` = β · log-ratio, `rewards/accuracies` (a
    tie, up to rounding, is wrong), `rewards/margins`, `logps/chosen` and `logps/rejected`; with `nll_coef` also `nll`.
    As in TRL, rewards are averaged over tokens where there is no reference and the loss averages them.

    Args:
        ref_logprobs: [R]; None: the reference is uniform.
    """
    logprobs_N = batch.per_sequence(batch.logprobs)
    ratios_N = logprobs_N if ref_logprobs is None else batch.per_sequence(batch.logprobs - ref_logprobs)
    lengths_N = batch.per_sequence(batch.mask).clamp(min=1)
    sums_P = batch.pairs(ratios_N)
    compared_P = batch.pairs(ratios_N / lengths_N) if options.loss_type in AVERAGED else sums_P
    logprobs_P = batch.pairs(logprobs_N)
    # Log-ratios to a reference that the policy still equals are differences of log-probs, and zero but for rounding.
    rewards_P, sizes_P = (compared_P, compared_P) if ref_logprobs is None else (sums_P, logprobs_P)
    _log_pairs(batch, logprobs_P, rewards_P, sizes_P, options.beta)
    loss_P = pair_losses(*compared_P, options)
    if options.nll_coef:
        nll_P = -batch.pairs(logprobs_N / lengths_N)[0]
        batch.log("nll", nll_P, per="pair")
        loss_P = loss_P + options.nll_coef * nll_P
    return batch.mean_over_pairs(loss_P)


def pair_losses(chosen_P: Tensor, rejected_P: Tensor, options: DPOOptions) -> Tensor:
    """The loss [P] of each pair.

    Args:
        chosen_P, rejected_P: log-ratios to the reference, of `AVERAGED` losses averaged over tokens.
    """
    beta, smoothing = options.beta, options.label_smoothing
    chosen, rejected = beta * chosen_P, beta * rejected_P
    logits = beta * (chosen_P - rejected_P) - options.margin
    match options.loss_type:
        case DPOLoss.SIGMOID | DPOLoss.SIGMOID_NORM:
            return (1 - smoothing) * minus_log_sigmoid(logits) + smoothing * minus_log_sigmoid(-logits)
        case DPOLoss.ROBUST:
            right, wrong = (1 - smoothing) * minus_log_sigmoid(logits), smoothing * minus_log_sigmoid(-logits)
            return (right - wrong) / (1 - 2 * smoothing)
        case DPOLoss.HINGE:
            return (1 - logits).clamp(min=0)
        case DPOLoss.IPO:
            return (chosen_P - rejected_P - 1 / (2 * beta)) ** 2
        case DPOLoss.EXO_PAIR:
            right = logits.sigmoid() * (-minus_log_sigmoid(logits) - math.log1p(-smoothing))
            return right + (-logits).sigmoid() * (-minus_log_sigmoid(-logits) - math.log(smoothing))
        case DPOLoss.NCA_PAIR:
            lowered = minus_log_sigmoid(-chosen) + minus_log_sigmoid(-rejected)
            return minus_log_sigmoid(chosen) + lowered / 2
        case DPOLoss.BCO_PAIR:
            return minus_log_sigmoid(chosen) + minus_log_sigmoid(-rejected)
        case DPOLoss.SPPO_HARD:
            return (chosen_P - 1 / (2 * beta)) ** 2 + (rejected_P + 1 / (2 * beta)) ** 2
        case DPOLoss.APO_ZERO:
            return (-chosen).sigmoid() + rejected.sigmoid()
        case DPOLoss.APO_DOWN:
            return chosen.sigmoid() + (-logits).sigmoid()
        case DPOLoss.ORPO:
            return beta * minus_log_sigmoid(_log_odds(chosen_P) - _log_odds(rejected_P))


def _log_odds(logprobs: Tensor) -> Tensor:
    """log(p / (1 − p)) of log p < 0. Probabilities above 1 − 1e-6 count as that."""
    return logprobs - (-logprobs.clamp(max=-1e-6).expm1()).log()


def _log_pairs(batch: LossBatch, logprobs_P: Pair, rewards_P: Pair, sizes_P: Pair, beta: float) -> None:
    """Log what is watched of pairs. Two rewards, before β, are a tie within the rounding of numbers of these sizes."""
    (chosen_P, rejected_P), (of_chosen_P, of_rejected_P) = rewards_P, sizes_P
    logged = {
        "rewards/chosen": beta * chosen_P,
        "rewards/rejected": beta * rejected_P,
        "rewards/margins": beta * (chosen_P - rejected_P),
        "rewards/accuracies": is_higher(chosen_P, rejected_P, of_chosen_P.abs() + of_rejected_P.abs()),
        "logps/chosen": logprobs_P[0],
        "logps/rejected": logprobs_P[1],
    }
    for name, values_P in logged.items():
        batch.log(name, values_P, per="pair")

"""KTO: learning from responses that are labelled desirable or undesirable, each by itself (Ethayarajh et al. 2024,
arXiv 2402.01306), and its relative without a reference point.

As in DPO the policy's own log-ratio to the reference, r = log π(y | x) / π_ref(y | x), is the reward, up to β. A
response is not compared with another one of its prompt, but with the reference point z₀, an estimate of KL(π ‖ π_ref):
a desirable response should be above it, an undesirable one below it, and the further away it is, the less it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import partial

import numpy as np
from pydantic import Field

from plait.algorithms.advantages import FloatArray
from plait.algorithms.kl import mean_kl
from plait.algorithms.losses import KLEstimator, LossBatch, Tensor, of_samples
from plait.algorithms.options import UpdateOptions
from plait.dataflow import Labelled, Level, Role, per_batch


class KTOLoss(StrEnum):
    """With r = Σ_t log π − log π_ref of a response, and λ the weight of its label."""

    KTO = "kto"
    """λ (1 − σ(β (r − z₀))) of a desirable response, λ (1 − σ(β (z₀ − r))) of an undesirable one (eq. 7)."""
    APO_ZERO_UNPAIRED = "apo_zero_unpaired"
    """The same with z₀ = 0 (D'Oosterlinck et al. 2024, arXiv 2408.06266, APO-zero, eq. 7; unpaired as in TRL): for
    responses that are better than the policy's own."""


class KTOOptions(UpdateOptions):
    beta: float = Field(default=0.1, gt=0, description="weight of the KL to the reference that is implied")
    loss_type: KTOLoss = Field(default=KTOLoss.KTO, description="kto or apo_zero_unpaired")
    desirable_weight: float = Field(default=1.0, gt=0, description="weight of responses that are labelled true")
    undesirable_weight: float = Field(default=1.0, gt=0, description="weight of responses that are labelled false")


def kto(labelled: Labelled, actor: Role, ref: Role, options: KTOOptions) -> None:
    """The flow. The reference point is that of the whole batch and of the policy that the step begins with: one number
    for all mini-batches and epochs, without a gradient."""
    ref_logprobs = ref.logprobs(labelled)
    kl = None
    if options.loss_type is KTOLoss.KTO:
        others = labelled.mismatched
        scored = actor.logprobs(others), ref.logprobs(others), others.trained
        kl = per_batch(reference_point, *scored, name="objective/kl", level=Level.BATCH)
    actor.train(
        labelled,
        loss=partial(kto_loss, options=options),
        mask=labelled.trained,
        mini_batches=options.mini_batches,
        epochs=options.epochs,
        label=labelled.label,
        desirable=per_batch(np.mean, labelled.label, name="desirable", level=Level.BATCH),
        ref_logprobs=ref_logprobs,
        kl=kl,
    )


MOST_DESIRABLE = 4 / 3
"""How much more desirable responses should weigh than the others, in all, at most; at least as much (eq. 8)."""


def unbalanced(desirable: int, undesirable: int, options: KTOOptions) -> str | None:
    """What is to be said of data with so many responses of either label, as TRL says it; None: nothing."""
    if desirable == 0 or undesirable == 0:
        return f"all labels are {'true' if desirable else 'false'}, so nothing says which responses are not so"
    ratio = options.desirable_weight * desirable / (options.undesirable_weight * undesirable)
    if desirable == undesirable or 1 <= ratio <= MOST_DESIRABLE:
        return None
    mine, theirs = options.desirable_weight / ratio, options.undesirable_weight * ratio
    return (
        f"{desirable:,} responses are labelled true and {undesirable:,} false, which weigh {ratio:.2g} : 1 in all; "
        f"1 : 1 to {MOST_DESIRABLE:.2g} : 1 is advised: `options.desirable_weight` from {mine:.2g} to "
        f"{mine * MOST_DESIRABLE:.2g}, or `options.undesirable_weight` from {theirs / MOST_DESIRABLE:.2g} to "
        f"{theirs:.2g}"
    )


def reference_point(
    logprobs: Sequence[FloatArray], ref_logprobs: Sequence[FloatArray], trained: Sequence[FloatArray]
) -> float:
    """z₀ = max(0, mean of Σ_t log π(y' | x) − log π_ref(y' | x)), in nats, over the prompts x of the batch with
    completions y' of others: the estimate of the paper, as those of the policy itself would have to be drawn.

    Args:
        logprobs, ref_logprobs: [tokens] of each y'.
        trained: [tokens] of each, 1.0 where it counts, else 0.0.
    """
    mine, theirs = ([p * kept for p, kept in zip(of, trained, strict=True)] for of in (logprobs, ref_logprobs))
    return max(0.0, mean_kl(mine, theirs, KLEstimator.K1))


def kto_loss(
    batch: LossBatch,
    label: Tensor,
    desirable: Tensor,
    ref_logprobs: Tensor,
    kl: Tensor | float = 0.0,
    *,
    options: KTOOptions,
) -> Tensor:
    """Mean over responses of the loss named by `loss_type`, see `KTOLoss`.

    Logs, under TRL's names, means over the responses of either label (exact where mini-batches are of equal size):
    `rewards/chosen` and `rewards/rejected` = β · log-ratio of desirable and of undesirable ones, `rewards/margins`, the
    difference of these means, `logps/chosen` and `logps/rejected`; each only where the batch has such responses.

    Args:
        label: [R], 1.0 where a response is desirable, else 0.0.
        desirable: the share of such responses in the batch, a scalar on the host.
        ref_logprobs: [R].
        kl: z₀, a scalar.
    """
    logprobs_N = batch.per_sequence(batch.logprobs)
    ratios_N = batch.per_sequence(batch.logprobs - ref_logprobs)
    labels_N = of_samples(batch, label)
    _log_labels(batch, logprobs_N, options.beta * ratios_N, labels_N, float(desirable))
    signs_N = 2 * labels_N - 1
    weights_N = options.desirable_weight * labels_N + options.undesirable_weight * (1 - labels_N)
    return batch.mean_over_sequences(weights_N * (-signs_N * options.beta * (ratios_N - kl)).sigmoid())


def _log_labels(batch: LossBatch, logprobs_N: Tensor, rewards_N: Tensor, labels_N: Tensor, desirable: float) -> None:
    # A mean over some samples is one over all, of numbers that are 0 for the others and weighed up by the share.
    chosen_N, rejected_N = labels_N / max(desirable, 1e-9), (1 - labels_N) / max(1 - desirable, 1e-9)
    if desirable > 0:
        batch.log("rewards/chosen", rewards_N * chosen_N, per="sequence")
        batch.log("logps/chosen", logprobs_N * chosen_N, per="sequence")
    if desirable < 1:
        batch.log("rewards/rejected", rewards_N * rejected_N, per="sequence")
        batch.log("logps/rejected", logprobs_N * rejected_N, per="sequence")
    if 0 < desirable < 1:
        batch.log("rewards/margins", rewards_N * (chosen_N - rejected_N), per="sequence")

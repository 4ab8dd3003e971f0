"""What a training call reports: actions as they are done, and metrics of mini-batches. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING

from plait.schedule.work import Result, Work

if TYPE_CHECKING:
    from plait.models.parallel.team import Team

COUNTS = frozenset(
    {
        "optimizer_steps",
        "skipped_steps",
        "nonfinite_losses",
        "nonfinite_gradients",
        "nonfinite_outputs",
        "masked_mini_batches",
        "tokens_computed",
        "tokens_unshared",
    }
)
"""Metrics of a `train` call that add up where a role is trained twice; they stand behind the last `/`."""

OF_EACH_CALL = frozenset({"loss", "entropy", "grad_norm", "lr", "mask_coverage", "eos_coverage"})
"""Metrics of a `train` call, behind its role, that any call has which trains on something."""


def counted(work: Work[Result], *teams: Team) -> Work[Result]:
    """The same actions, with the bytes that came to this rank in them where they do not say so themselves.

    Args:
        teams: that compute together in it, each another model.
    """
    received = lambda: sum(team.received_bytes for team in teams)
    while True:
        before = received()
        try:
            done = next(work)
        except StopIteration as end:
            return end.value
        yield done if done is None or done.bytes else replace(done, bytes=received() - before)


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    learning_rate: float
    grad_norm: float
    """Global norm before clipping; not finite where the step was skipped for it."""
    skipped: bool
    loss_is_finite: bool = True


@dataclass(frozen=True)
class TermResult:
    """What one loss gave in a mini-batch, over all ranks."""

    metrics: dict[str, float]
    is_masked: bool = False
    """Every token is masked, so there was no forward."""
    tokens_computed: int = 0
    num_nonfinite: int = 0
    rollout: dict[str, float] = field(default_factory=dict)
    """The comparison with the sampling engine (`rollout_check`): only where it was asked for."""


@dataclass(frozen=True)
class MiniBatchResult:
    """What one mini-batch gave, over all ranks."""

    terms: tuple[TermResult | None, ...]
    """What each loss gave; None: it has no mini-batch any more."""
    report: StepReport | None
    """None: every token of all losses is masked, so there was no step."""

    @property
    def is_applied(self) -> bool:
        return self.report is not None and not self.report.skipped


def train_metrics(
    results: Sequence[MiniBatchResult], term: int, role: str, counts: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of a training call, which is one of the losses of its optimizer steps.

    What the loss logs, `{role}/entropy` (nats, at the sampling temperature) and `{role}/loss`: token means (the loss:
    as aggregated) of each mini-batch, then the mean over optimizer steps. Skipped steps are left out of these means.
    `training/rollout_*` compare the forward of the first mini-batch, before its step, with the sampling engine
    (`rollout_check`).

    Of the steps the first loss tells, for all: `{role}/grad_norm`, before clipping, as the means above; `{role}/lr` of
    the last step; and counts, `optimizer_steps`, of them `skipped_steps` for `nonfinite_losses` or
    `nonfinite_gradients`.

    Counts of each loss: `nonfinite_outputs` of the model; `masked_mini_batches` without a trained token;
    `tokens_computed`, packed tokens, and `tokens_unshared`, what they would be with every sample's own prompt;
    `mask_coverage` and `eos_coverage` (`rollout_check.coverage`). All counts are under `training/` for the actor and
    under `{role}/` for another role.

    Args:
        results: of all mini-batches, in their order.
        term: which of the losses.
        counts: those that the mini-batches do not tell, by their names without prefix.
    """
    mine = [(found, result.is_applied) for result in results if (found := result.terms[term]) is not None]
    applied = [found.metrics for found, is_applied in mine if is_applied and not found.is_masked]
    if not applied:  # nothing was trained on: say the loss of it, 0
        applied = [found.metrics for found, _ in mine if found.is_masked]
    names = dict.fromkeys(name for metrics in applied for name in metrics)
    metrics = {name: fmean(m[name] for m in applied if name in m) for name in names}
    reports = [result.report for result in results if result.report is not None]
    of_steps: dict[str, float] = {}
    if term == 0:
        skipped = [report for report in reports if report.skipped]
        if norms := [report.grad_norm for report in reports if not report.skipped]:
            metrics[f"{role}/grad_norm"] = fmean(norms)
        of_steps = {
            "optimizer_steps": len(reports),
            "skipped_steps": len(skipped),
            "nonfinite_losses": sum(not report.loss_is_finite for report in skipped),
            "nonfinite_gradients": sum(not math.isfinite(report.grad_norm) for report in skipped),
        }
    counts = {
        **of_steps,
        "nonfinite_outputs": sum(found.num_nonfinite for found, _ in mine),
        "masked_mini_batches": sum(found.is_masked for found, _ in mine),
        "tokens_computed": sum(found.tokens_computed for found, _ in mine),
        **counts,
    }
    # Several roles may train in one step: only the actor's counts go by the field's name for them.
    prefix = "training" if role == "actor" else role
    metrics |= {f"{prefix}/{name}": value for name, value in counts.items()}
    if reports and term == 0:
        metrics[f"{role}/lr"] = reports[-1].learning_rate
    return metrics | next((found.rollout for found, _ in mine if found.rollout), {})

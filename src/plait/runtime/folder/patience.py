"""Whether a run ends before its last step, as its evaluations get no better (`evaluation.patience`): what its folder
says of that, so that a resumed run knows what an uninterrupted one does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.observe.run_log import numbers_of, read_steps
from plait.recipes.evaluation_settings import EvaluationSettings


@dataclass(frozen=True)
class Spent:
    """Why a run has ended early."""

    step: int
    """Its last one."""
    evaluations: int
    """Those since the best."""
    best_by: str
    best: float
    """The best value of the metric."""
    best_step: int
    """0: no evaluation said it."""

    @property
    def text(self) -> str:
        """In words."""
        last = "the last evaluation was" if self.evaluations == 1 else f"the last {self.evaluations} evaluations were"
        best = f"was {self.best:.4g} after step {self.best_step}" if self.best_step else "was never a number"
        return (
            f"the run ends after step {self.step}: {last} no better, `{self.best_by}` {best} (`evaluation.patience`; "
            "with more of it, or 0, a resumed run goes on)"
        )


def value_by(best_by: str, metrics: Mapping[str, float]) -> float:
    """What evaluations are compared by, higher is better; NaN: this one does not say it.

    Args:
        best_by: `evaluation.best_by`.
    """
    name = best_by.removeprefix("-")
    value = metrics.get(name, math.nan)
    return value if name == best_by else -value


def spent_patience(log: Path, settings: EvaluationSettings, step: int) -> Spent | None:
    """Why a run ends after `step`, if it does: so many of its evaluations after a step, in a row, were no better by
    `evaluation.best_by` than one before them.

    Args:
        log: its evaluations.

    Raises:
        DataError: it is damaged.
    """
    if settings.patience == 0 or settings.best_by is None or not log.exists():
        return None
    best, best_step, since, last = -math.inf, 0, 0, 0
    for row in read_steps(log):
        if not 0 < row["step"] <= step:
            continue
        value, last = value_by(settings.best_by, numbers_of(row, log)), row["step"]
        since += 1
        if value > best:
            best, best_step, since = value, last, 0
    if since < settings.patience:
        return None
    shown = -best if settings.best_by.startswith("-") else best
    return Spent(step, since, settings.best_by.removeprefix("-"), shown, best_step)

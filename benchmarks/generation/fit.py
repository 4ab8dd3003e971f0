"""Step times as a function of what a step works on, and the profile file that the cost model will read.

    t(batch, context, tokens) = w₀ + w_b · batch + w_c · context + w_t · tokens + Σ_q w_q · max(0, tokens - q)

with no weight below 0: convex in the tokens, so that more of them are never predicted to be cheaper. Fitted by least
squares of the relative errors, so that short steps count as much as long ones. What a step spends on packing weights is
no function of its work and is not in its seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from generation.serving import Step
from plait.launch.machine import cpu_name

KNOTS = (8, 16, 32, 64, 128)
FORMAT = 1


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    constant: float
    batch: float
    """Per sequence."""
    context: float
    """Per token that the sequences held before."""
    tokens: float
    """Per token that goes through the model."""
    beyond: dict[int, float]
    """Tokens → further seconds per token beyond so many."""

    def seconds(self, batch: int, context: int, tokens: int) -> float:
        rest = sum(weight * max(0, tokens - knot) for knot, weight in self.beyond.items())
        return self.constant + self.batch * batch + self.context * context + self.tokens * tokens + rest


def typical(runs: Sequence[Sequence[Step]]) -> list[Step]:
    """The steps of one case with the medians of their seconds over runs; runs of other steps are left out.

    Decisions do not depend on time, so the runs of a case have the same steps.
    """
    work = [[(step.batch, step.context, step.tokens) for step in run] for run in runs]
    alike = [run for run, steps in zip(runs, work, strict=True) if steps == work[0]]
    return [replace(steps[0], seconds=median(step.seconds for step in steps)) for steps in zip(*alike, strict=True)]


def fit(steps: Sequence[Step]) -> StepTime:
    """Least squares of the relative errors with non-negative weights."""
    columns = np.array(
        [[1, s.batch, s.context, s.tokens, *(max(0, s.tokens - knot) for knot in KNOTS)] for s in steps], dtype=float
    )
    seconds = np.array([s.seconds for s in steps])
    relative = columns / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0] = 1
    weights = _non_negative(relative / scale, np.ones(len(steps))) / scale
    constant, batch, context, tokens, *beyond = weights.tolist()
    return StepTime(constant, batch, context, tokens, dict(zip(KNOTS, beyond, strict=True)))


def _non_negative(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """w ≥ 0 with the least |columns · w − wanted|: Lawson and Hanson (1974), chapter 23."""
    weights = np.zeros(columns.shape[1])
    free = np.zeros(columns.shape[1], dtype=bool)
    for _ in range(3 * len(weights)):
        pull = np.where(free, -np.inf, columns.T @ (wanted - columns @ weights))
        if pull.max() <= 1e-9 * np.linalg.norm(wanted):
            break
        free[pull.argmax()] = True
        while True:
            solution = np.zeros_like(weights)
            solution[free] = np.linalg.lstsq(columns[:, free], wanted, rcond=None)[0]
            below = free & (solution <= 0)
            if not below.any():
                break
            # As far towards it as all weights stay above 0; those that reach 0 stay there for now.
            weights += (weights[below] / (weights[below] - solution[below])).min() * (solution - weights)
            free &= weights > 1e-12
            weights[~free] = 0
        weights = solution
    return weights


def r_squared(model: StepTime, steps: Sequence[Step]) -> float:
    """Share of the variance of the seconds that the model explains; 1.0 where they do not vary."""
    seconds = np.array([s.seconds for s in steps])
    errors = seconds - [model.seconds(s.batch, s.context, s.tokens) for s in steps]
    variance = ((seconds - seconds.mean()) ** 2).sum()
    return float(1 - (errors**2).sum() / variance) if variance > 0 else 1.0


def mean_error(model: StepTime, steps: Sequence[Step]) -> float:
    """Mean of |predicted − found| / found."""
    return float(np.mean([abs(model.seconds(s.batch, s.context, s.tokens) / s.seconds - 1) for s in steps]))


def write_profile(path: Path, step_time: StepTime, **described: object) -> None:
    """A JSON file: what was measured (`described`), on which processor, and the weights in seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = {"format": FORMAT, "processor": cpu_name(), **described, "step_s": asdict(step_time)}
    path.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")

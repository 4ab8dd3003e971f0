"""What a plan's prediction said, beside what the run measured: RUN_DIR/forecast.json, and a table at the end."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from plait.observe.run_log import read_steps
from plait.output import write_file
from plait.runtime.run_files import RunFiles
from plait.schedule.plan import Plan
from plait.schedule.timeline import Timeline

WARM_UP = 1
"""Steps at the beginning that are left out where there are more: what they load and compile, others do not."""
STEP = "step"


@dataclass(frozen=True)
class Beside:
    """Seconds of a call in a step, on the rank that is busiest with it; of `step`, those of all. None: not predicted,
    or not run."""

    call: str
    predicted_s: float | None
    measured_s: float | None

    @property
    def error(self) -> float | None:
        """Error of the prediction, as a share of what was measured."""
        if self.predicted_s is None or not self.measured_s:
            return None
        return self.predicted_s / self.measured_s - 1.0


def forecast_beside(plan: Plan, rows: Sequence[Mapping[str, float]]) -> list[Beside]:
    """Lay a plan's predicted timeline beside the metrics of each step; measured seconds by their median."""
    assert plan.predicted is not None, f"plan {plan.name} has no prediction"
    predicted = predicted_seconds(plan.predicted)
    steady = rows[WARM_UP:] or rows
    calls = []
    for call, seconds in predicted.items():
        measured = [row[f"timing_s/{call}"] for row in steady if f"timing_s/{call}" in row]
        calls.append(Beside(call, seconds, median(measured) if measured else None))
    return calls


def predicted_seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds of each call in a step, as metrics count them: busy ones, of the busiest rank. Then those of a step."""
    steps = {span.step for span in timeline.spans}
    busy: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in timeline.spans:
        busy[_name(span.action, span.kind)][span.rank] += span.duration_s
    by_call = {call: max(ranks.values()) / len(steps) for call, ranks in busy.items()}
    return by_call | {STEP: timeline.makespan_s / max(1, len(steps))}


def _name(action: str, kind: str) -> str:
    """As metrics name it: what leaves a device and comes back stands under the role."""
    role = action.split(".", 1)[0]
    return f"{role}.{kind.lower()}" if kind in ("OFFLOAD", "ONLOAD") else action


def write_forecast(folder: Path) -> list[Beside]:
    """Hold the prediction of the plan in a run's folder against its steps, and write that there. Empty where the plan
    has no prediction, or no step was done."""
    files = RunFiles(folder)
    if not files.plan.is_file():
        return []
    plan, rows = Plan.load(files.plan), read_steps(files.metrics)
    if plan.predicted is None or not rows:
        return []
    calls = forecast_beside(plan, rows)
    record = {"plan": plan.name, "calls": [{**asdict(call), "error": call.error} for call in calls]}
    write_file(files.forecast, json.dumps(record, indent=1) + "\n")
    return calls

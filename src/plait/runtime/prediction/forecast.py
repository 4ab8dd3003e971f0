"""What was predicted of a run, beside what it measured: RUN_DIR/forecast.json, and a table at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from plait.cost.corrections import Correction, Corrections, carried_record
from plait.cost.device_memory import READING, memory_of_plan
from plait.cost.working_memory import MESSAGES, OUTSIDE
from plait.output import write_file
from plait.recipes.turn_checks import said_of_made, said_of_rounds
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import Prepared
from plait.runtime.prediction.machine import machine_of
from plait.schedule.busy import busiest_s, call_of, kind_of
from plait.schedule.plan import Plan
from plait.schedule.timeline import Span, Timeline

WARM_UP = 1
"""Steps at the beginning that are left out where there are more: what they load and compile, others do not."""
WORTH_SAYING, WORTH_COUNTING = 0.01, 0.1
"""The share of a step beyond which what took it is told, though it was not predicted; beyond which the step is then no
longer what was predicted."""
STEP = "step"
ON_DEVICES = {"TRAIN": "TRAIN and STEP", "STEP": "TRAIN and STEP"}
"""Kinds whose seconds say something only together where GPUs compute: the host asks for a forward or backward and goes
on, and the optimizer step waits for all of them."""
CALL_S, KIND_S = "timing_s/", "perf/kind_s/"
PEAK_BYTES, DEVICE_PEAK_BYTES = "perf/peak_bytes/rank_", "perf/device_peak_bytes/rank_"
"""How the names of metrics begin: busy seconds of calls and of kinds of actions; what a rank's process, and its GPU,
have held at most."""


@dataclass(frozen=True)
class Beside:
    """What was predicted beside what was measured: seconds of a call or a kind of action in a step, on the rank that is
    busiest with it (of `step`, those of all); or the most bytes that a rank holds. None: not predicted, or not
    measured."""

    name: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Error of the prediction, as a share of what was measured."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class Forecast:
    """A run's prediction beside its measurement. source: where predicted seconds come from, in words; `memory` is named
    by ranks; carried: kind of calls → its correction, where that was measured on another number of ranks; cold: what
    was measured is a first step, which also loads and compiles."""

    plan: str
    source: str
    calls: Sequence[Beside]
    kinds: Sequence[Beside]
    memory: Sequence[Beside]
    carried: Mapping[str, Correction] = field(default_factory=dict)
    cold: bool = False

    @property
    def not_predicted(self) -> list[str]:
        """Calls that took more than `WORTH_COUNTING` of a step, and that its prediction leaves out; none where there is
        no prediction."""
        if not any(call.predicted for call in self.calls):
            return []
        return [call.name for call in self.calls if call.predicted is None and self.took(call, WORTH_COUNTING)]

    def took(self, beside: Beside, share: float) -> bool:
        """Whether something, but the step itself, took more than this share of a step."""
        step_s = next((call.measured or 0.0 for call in self.calls if call.name == STEP), 0.0)
        return beside.name != STEP and (beside.measured or 0.0) > share * step_s

    def to_json(self) -> str:
        record = {
            "plan": self.plan,
            "source": self.source,
            "calls": [_record("call", call.name, call, "s") for call in self.calls],
            "kinds": [_record("kind", kind.name, kind, "s") for kind in self.kinds],
            "memory": [_record("rank", int(rank.name), rank, "bytes") for rank in self.memory],
            "carried": carried_record(self.carried),
            "cold": self.cold,
        }
        return json.dumps(record, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Forecast:
        """What `to_json` has written."""
        record = json.loads(path.read_text(encoding="utf-8"))
        read = lambda key, what, unit: [
            Beside(str(row[what]), row[f"predicted_{unit}"], row[f"measured_{unit}"]) for row in record[key]
        ]
        parts = read("calls", "call", "s"), read("kinds", "kind", "s"), read("memory", "rank", "bytes")
        carried = {
            kind: Correction(correction["factor"], correction["of"], correction["steps"], carried=True)
            for kind, correction in record.get("carried", {}).items()
        }
        return cls(record["plan"], record["source"], *parts, carried, record.get("cold", False))


def _record(what: str, name: str | int, beside: Beside, unit: str) -> dict[str, str | int | float | None]:
    return {
        what: name,
        f"predicted_{unit}": beside.predicted,
        f"measured_{unit}": beside.measured,
        "error": beside.error,
    }


def forecast_of(
    plan: Plan,
    source: str,
    held_bytes: Mapping[int, int],
    rows: Sequence[Mapping[str, float]],
    carried: Mapping[str, Correction] | None = None,
) -> Forecast:
    """Lay a plan's predicted timeline beside the metrics of steps: seconds by their median, bytes by the most.

    Args:
        source: of the predicted seconds, in words.
        held_bytes: rank → what it is predicted to hold at most.
        rows: at least one.
        carried: corrections in these seconds, as of `Forecast`.
    """
    steady = rows[WARM_UP:] or rows
    calls = kinds = {}
    if plan.predicted is not None:
        calls, kinds = predicted_seconds(plan.predicted), seconds_a_step(plan.predicted, kind_of)
    measured_calls, measured_kinds = _measured(steady, CALL_S, median), _measured(steady, KIND_S, median)
    step_s = calls.pop(STEP, None), measured_calls.pop(STEP, None)
    on_devices = any(name.startswith(DEVICE_PEAK_BYTES) for name in rows[-1])
    if on_devices:
        kinds, measured_kinds = _added_up(kinds), _added_up(measured_kinds)
    peaks = _measured(rows, DEVICE_PEAK_BYTES if on_devices else PEAK_BYTES, max)
    return Forecast(
        plan.name,
        source,
        [*_beside(calls, measured_calls), Beside(STEP, *step_s)],
        _beside(kinds, measured_kinds),
        _beside({str(rank): count for rank, count in held_bytes.items()}, peaks),
        carried or {},
        cold=len(rows) <= WARM_UP,
    )


def predicted_seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds of each call in a step, as metrics count them: busy ones, of the busiest rank. Then those of a step."""
    steps = len({span.step for span in timeline.spans})
    return seconds_a_step(timeline, call_of) | {STEP: timeline.makespan_s / max(1, steps)}


def seconds_a_step(timeline: Timeline, name_of: Callable[[Span], str]) -> dict[str, float]:
    """Name → busy seconds in a step, of the busiest rank."""
    steps = len({span.step for span in timeline.spans})
    return {name: seconds / steps for name, seconds in busiest_s(timeline, name_of).items()}


def write_forecast(prepared: Prepared, folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Hold the prediction of a run against its steps, and write that in its folder; nothing before a step is done.

    Args:
        rows: metrics of the steps by this plan.

    Raises:
        OSError: it cannot be written.
    """
    if rows:
        _, calibration = machine_of(prepared.recipe, prepared.shape, prepared.plan.num_ranks)
        profile, roles = calibration.profile, [model.role for model in prepared.models]
        corrections = Corrections({} if profile is None else profile.ratios(prepared.plan.num_ranks))
        carried = corrections.carried(prepared.plan.placements, roles)
        rounds, made = said_of_rounds(prepared.flow, prepared.recipe), said_of_made(prepared.flow)
        source = "; ".join(filter(None, (calibration.source, rounds, made)))
        forecast = forecast_of(prepared.plan, source, _held_bytes(prepared), rows, carried)
        write_file(RunFiles(folder).forecast, forecast.to_json())


def read_forecast(folder: Path) -> Forecast | None:
    """That of the run in a folder; None where no step was done."""
    path = RunFiles(folder).forecast
    return Forecast.load(path) if path.is_file() else None


def _held_bytes(prepared: Prepared) -> dict[int, int]:
    """Rank → what a dry run says that it holds; of a GPU what tensors take, which is measured there."""
    devices = memory_of_plan(
        prepared.recipe, prepared.flow, prepared.models, prepared.shapes, prepared.plan, prepared.lengths
    )
    held_bytes: dict[int, int] = {}
    for device in devices:
        outside = {what: count for what, count in device.rows if what in OUTSIDE}
        late = {READING: outside.get(MESSAGES, 0)}
        tensors = max(count + late.get(what, 0) for what, count in device.during) - sum(outside.values())
        held_bytes |= dict.fromkeys(device.ranks, tensors)
    return dict(sorted(held_bytes.items()))


def _measured(
    rows: Sequence[Mapping[str, float]], prefix: str, of_all: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    """Name without its prefix → one value of those of all steps that have it, in the order of the names' places."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(prefix))
    return {name.removeprefix(prefix): of_all(row[name] for row in rows if name in row) for name in names}


def _added_up(kinds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind, as far as GPUs tell them apart."""
    together: dict[str, float] = {}
    for kind, seconds in kinds.items():
        name = ON_DEVICES.get(kind, kind)
        together[name] = together.get(name, 0.0) + seconds
    return together


def _beside(predicted: Mapping[str, float], measured: Mapping[str, float]) -> list[Beside]:
    """What was predicted first, in its order."""
    return [Beside(name, predicted.get(name), measured.get(name)) for name in dict.fromkeys((*predicted, *measured))]

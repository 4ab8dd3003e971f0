"""What `plait plan` and `plait simulate` say of a plan, as a record for a program; `plan_text` is for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.cli.placement_text import unlike
from plait.cost.corrections import Correction, carried_record
from plait.dataflow import CallKind
from plait.recipes.engine_checks import of_engines
from plait.recipes.open_keys import MEMORY_KEYS
from plait.recipes.turn_checks import said_of_made, said_of_rounds
from plait.runtime.prediction.choosing import Choice, PredictedPlan
from plait.runtime.prediction.draft_forecast import DraftForecast, draft_forecast
from plait.runtime.prediction.planning import Planning
from plait.schedule.plan import Plan
from plait.simulator.steps import CallRecord, Prediction

CALLS = ("DECODE", "SCORE", "TRAIN")
FUNCTIONS = "FUNCTIONS"


@dataclass(frozen=True)
class Report:
    """variants: of the recipe, by the keys in which they differ from it; states_lengths: the user does"""

    planning: Planning
    choice: Choice
    variants: Sequence[PredictedPlan]
    states_lengths: bool

    @property
    def plan(self) -> Plan:
        return self.choice.best.plan

    @property
    def prediction(self) -> Prediction:
        return self.choice.best.prediction

    @property
    def tokens_per_s(self) -> float:
        return self.planning.workload.tokens_of_step(self.planning.flow) / self.prediction.seconds_per_step

    @property
    def price_of_1000_steps(self) -> float | None:
        price = self.planning.cluster.price_per_hour
        if price is None:
            return None
        return price * self.prediction.seconds_per_step * 1000 / 3600

    def alternatives(self) -> list[dict[str, Any]]:
        """The next plans, what each spends more time on, and where it has calls that this plan has elsewhere."""
        rows = []
        for simulated in self.choice.alternatives:
            row, otherwise = self._row(simulated), unlike(self.plan, simulated.plan)
            rows.append(row | {"why": f"{row['why']}; {otherwise}" if otherwise else row["why"]})
        return rows

    def baseline_rows(self) -> list[dict[str, Any]]:
        """Named plans and those that others would make, and what each spends more or less time on."""
        return [self._row(plan) | {"feasible": plan.prediction.feasible} for plan in self.choice.baselines]

    def variant_rows(self) -> list[dict[str, Any]]:
        """The recipe with other keys, and what it would spend more or less time on."""
        return [self._row(plan) | {"feasible": plan.prediction.feasible} for plan in self.variants]

    def _row(self, other: PredictedPlan) -> dict[str, Any]:
        reason = why(self.prediction, other.prediction)
        if not other.prediction.feasible:
            most = max(rank.peak_bytes / rank.limit_bytes for rank in other.prediction.memory)
            reason = f"does not fit: {most:.2f} times a device's memory"
        return {"name": other.name, "seconds_per_step": other.prediction.seconds_per_step, "why": reason}

    def record(self) -> dict[str, Any]:
        prediction, choice = self.prediction, self.choice
        return {
            "plan": self.plan.name,
            "devices": self.plan.num_ranks,
            "cluster": self.planning.cluster.name,
            "seconds_per_step": prediction.seconds_per_step,
            "tokens_per_s": self.tokens_per_s,
            "price_of_1000_steps": self.price_of_1000_steps,
            "feasible": prediction.feasible,
            **{key: getattr(self.planning.followed(self.plan).recipe, key) for key in MEMORY_KEYS},
            "calls": [row for call in prediction.calls if is_call(call) for row in _call_rows(call)],
            "moves": [
                {
                    "name": call.call,
                    "kind": call.kind,
                    "start_s": call.start_s,
                    "seconds": call.seconds,
                    "bytes": call.bytes,
                }
                for call in prediction.calls
                if not is_call(call)
            ],
            "memory": [
                {
                    "rank": m.rank,
                    "device": self.planning.cluster.device_of(m.rank).name,
                    "peak_bytes": m.peak_bytes,
                    "limit_bytes": m.limit_bytes,
                    "terms": m.terms,
                }
                for m in prediction.memory
            ],
            "baselines": self.baseline_rows(),
            "alternatives": self.alternatives(),
            "variants": self.variant_rows(),
            "calibration": self._calibration(),
            "speculation": self._speculation(),
            "rounds": said_of_rounds(self.planning.flow, self.planning.recipe),
            "made": said_of_made(self.planning.flow, self.planning.lengths.beside),
            "evaluations": choice.evaluations,
            "seconds_spent": choice.seconds,
        }

    def _calibration(self) -> dict[str, Any]:
        calibration = self.planning.calibration
        return {
            "source": calibration.source,
            "error": calibration.error,
            "kinds": dict(calibration.kinds),
            "runs": calibration.runs,
            "carried": carried_record(carried_in(self.planning, self.plan)),
        }

    def _speculation(self) -> dict[str, Any] | None:
        """In the mean over steps of decoding; None: nothing is drafted."""
        forecast = draft_forecast_of(self.planning)
        return None if forecast is None else {"source": forecast.source, **asdict(forecast.drafts)}


def carried_in(planning: Planning, plan: Plan) -> Mapping[str, Correction]:
    """Kind of calls of a plan → its correction, where that is by runs on another number of ranks."""
    return planning.costs.corrections.carried(plan.placements, planning.costs.shapes)


def draft_forecast_of(planning: Planning) -> DraftForecast | None:
    """What draft tokens come to; None: none are made."""
    sampling, profile = of_engines(planning.recipe), planning.calibration.profile
    if not planning.flow.of_kind(CallKind.GENERATE):
        return None
    return draft_forecast(sampling, profile, planning.drafts, planning.acceptance)


def is_call(record: CallRecord) -> bool:
    """Whether a model or reward functions do it: it is no move and no copy."""
    return bool(record.placements) or record.kind == FUNCTIONS


def _call_rows(call: CallRecord) -> list[dict[str, Any]]:
    """One for each placement; reward functions have none, and stand on no ranks."""
    timed = {"start_s": call.start_s, "seconds": call.seconds, "bytes": call.bytes, "terms": call.terms}
    if not call.placements:
        nowhere = {"ranks": [], "dp": None, "tp": None, "pp": None, "stages": []}
        return [{"call": call.call, "mode": "functions", **nowhere, **timed}]
    return [
        {
            "call": call.call,
            "mode": call.mode,
            "ranks": list(p.ranks),
            "dp": p.dp,
            "tp": p.tp,
            "pp": p.pp,
            "stages": list(p.stages),
            **timed,
        }
        for p in call.placements
    ]


def why(shown: Prediction, other: Prediction) -> str:
    """What another plan spends more time on than the one that is shown, or less if it is faster: the two calls with
    most of the difference; where these do not explain nine tenths of it, that fewer calls overlap, if that is half of
    it or more; where they explain less than half, what the others come to."""
    lost_s = other.seconds_per_step - shown.seconds_per_step
    if abs(lost_s) <= 1e-9 * shown.seconds_per_step:
        return "as fast"
    sign = 1 if lost_s > 0 else -1
    mine, theirs = _seconds(shown), _seconds(other)
    gains = {name: sign * (theirs.get(name, 0.0) - mine.get(name, 0.0)) for name in theirs | mine}
    most = sorted(((gain, name) for name, gain in gains.items() if gain > 1e-9), reverse=True)
    more = "more" if sign > 0 else "less"
    parts = [f"{name} takes {gain:.3g} s {more}" for gain, name in most[:2]]
    named_s, others_s = (sum(gain for gain, _ in some) for some in (most[:2], most[2:]))
    hidden_s = abs(lost_s) - sum(gains.values())
    if named_s < 0.9 * abs(lost_s) and hidden_s >= 0.5 * abs(lost_s):
        parts.insert(0, "fewer calls overlap" if sign > 0 else "more calls overlap")
    elif named_s < 0.5 * abs(lost_s) and others_s > 0:
        parts.append(f"others take {others_s:.3g} s {more}")
    return ", ".join(parts) if sign > 0 else f"faster by {-lost_s:.3g} s: {', '.join(parts)}"


def _seconds(prediction: Prediction) -> dict[str, float]:
    seconds_by_call: dict[str, float] = {}
    for record in prediction.calls:
        name = record.call if record.kind in CALLS else f"{record.call} ({record.kind.lower()})"
        seconds_by_call[name] = seconds_by_call.get(name, 0.0) + record.seconds
    return seconds_by_call

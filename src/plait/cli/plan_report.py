"""What `plait plan` and `plait simulate` say of a plan, as a record for a program; `plan_text` is for a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plait.planner.plan_search import Candidate, SearchResult
from plait.runtime.planning import Planning
from plait.schedule.plan import Plan
from plait.simulator.steps import Prediction

CALLS = ("DECODE", "SCORE", "TRAIN")


@dataclass(frozen=True)
class Report:
    """result: None where the plan was given"""

    planning: Planning
    plan: Plan
    prediction: Prediction
    result: SearchResult | None = None
    baselines: tuple[Candidate, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.planning.workload.tokens_of_step(self.planning.flow) / self.prediction.seconds_per_step

    @property
    def price_of_1000_steps(self) -> float | None:
        price = self.planning.cluster.price_per_device_hour
        if price is None:
            return None
        return price * self.planning.cluster.num_devices * self.prediction.seconds_per_step * 1000 / 3600

    def alternatives(self) -> list[dict[str, Any]]:
        """The next plans, and what each spends more time on."""
        rows = []
        for number, candidate in enumerate(self.result.alternatives if self.result else ()):
            name = f"plan {number + 2}"
            prediction = self.planning.predict(self.planning.plan_of(candidate.places, name))
            rows.append(
                {
                    "name": name,
                    "seconds_per_step": prediction.seconds_per_step,
                    "why": why_slower(self.prediction, prediction),
                }
            )
        return rows

    def baseline_rows(self) -> list[dict[str, Any]]:
        rows = []
        for candidate in self.baselines:
            judged = candidate.judged
            prediction = (
                self.planning.predict(self.planning.plan_of(candidate.places, candidate.name))
                if not judged.idle
                else None
            )
            if judged.idle:
                why = f"{judged.idle} devices have nothing to do"
            elif judged.excess > 0:
                why = f"does not fit: {1 + judged.excess:.2f} times a device's memory"
            else:
                assert prediction is not None
                why = why_slower(self.prediction, prediction)
            rows.append(
                {"name": candidate.name, "seconds_per_step": judged.seconds, "feasible": judged.usable, "why": why}
            )
        return rows

    def record(self) -> dict[str, Any]:
        prediction, result = self.prediction, self.result
        calls = [
            {
                "call": call.call,
                "mode": call.mode,
                "ranks": list(p.ranks),
                "dp": p.dp,
                "tp": p.tp,
                "pp": p.pp,
                "stages": list(p.stages),
                "start_s": call.start_s,
                "seconds": call.seconds,
                "bytes": call.bytes,
                "terms": call.terms,
            }
            for call in prediction.calls
            for p in call.placements
        ]
        moves = [
            {
                "name": call.call,
                "kind": call.kind,
                "start_s": call.start_s,
                "seconds": call.seconds,
                "bytes": call.bytes,
            }
            for call in prediction.calls
            if not call.placements
        ]
        return {
            "plan": self.plan.name,
            "devices": self.plan.num_ranks,
            "cluster": self.planning.cluster.name,
            "seconds_per_step": prediction.seconds_per_step,
            "tokens_per_s": self.tokens_per_s,
            "price_of_1000_steps": self.price_of_1000_steps,
            "feasible": prediction.feasible,
            "calls": calls,
            "moves": moves,
            "memory": [
                {"rank": m.rank, "peak_bytes": m.peak_bytes, "limit_bytes": m.limit_bytes, "terms": m.terms}
                for m in prediction.memory
            ],
            "baselines": self.baseline_rows(),
            "alternatives": self.alternatives(),
            "calibration": self._calibration(),
            "evaluations": result.evaluations if result else 1,
            "seconds_spent": result.seconds if result else 0.0,
        }

    def _calibration(self) -> dict[str, Any]:
        calibration = self.planning.calibration
        return {
            "source": calibration.source,
            "error": calibration.error,
            "kinds": dict(calibration.kinds),
            "runs": calibration.runs,
        }


def why_slower(best: Prediction, other: Prediction) -> str:
    """What a plan spends more time on than the best one, the most first."""
    mine, theirs = _seconds(best), _seconds(other)
    more = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in theirs}
    slower = sorted(((gain, name) for name, gain in more.items() if gain > 1e-9), reverse=True)[:2]
    parts = [f"{name} takes {gain:.3g} s more" for gain, name in slower]
    lost = other.seconds_per_step - best.seconds_per_step
    if abs(lost) <= 1e-9 * best.seconds_per_step:
        return "as fast"
    if lost < 0:
        return f"faster by {-lost:.3g} s"
    if sum(gain for gain, _ in slower) < 0.5 * lost:
        parts.append("calls wait for each other")
    return ", ".join(parts)


def _seconds(prediction: Prediction) -> dict[str, float]:
    seconds_by_call: dict[str, float] = {}
    for record in prediction.calls:
        name = record.call if record.kind in CALLS else f"{record.call} ({record.kind.lower()})"
        seconds_by_call[name] = seconds_by_call.get(name, 0.0) + record.seconds
    return seconds_by_call

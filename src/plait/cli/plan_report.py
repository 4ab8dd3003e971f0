"""What `plait plan` and `plait simulate` say of a plan: as a table for a person, as a record for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.cost.estimate import human_bytes
from plait.planner.plan_search import Candidate, Found
from plait.runtime.planning import Planning, tokens_of
from plait.schedule.gantt import ascii_gantt
from plait.schedule.plan import Plan
from plait.schedule.timeline import Timeline
from plait.simulator.step_memory import RankMemory
from plait.simulator.steps import Prediction

GANTT_RANKS = 16
"""Rows of the picture in a terminal: of more ranks every so-manieth."""
CALLS = ("DECODE", "SCORE", "TRAIN")


@dataclass(frozen=True)
class Report:
    """found: None where the plan was given"""

    planning: Planning
    plan: Plan
    prediction: Prediction
    found: Found | None = None
    baselines: tuple[Candidate, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return tokens_of(self.planning) / self.prediction.seconds_per_step

    @property
    def price_of_1000_steps(self) -> float | None:
        price = self.planning.cluster.price_per_device_hour
        if price is None:
            return None
        return price * self.planning.cluster.num_devices * self.prediction.seconds_per_step * 1000 / 3600

    def alternatives(self) -> list[dict[str, Any]]:
        """The next plans, and what each spends more time on."""
        rows = []
        for number, candidate in enumerate(self.found.alternatives if self.found else ()):
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
        for one in self.baselines:
            judged = one.judged
            prediction = self.planning.predict(self.planning.plan_of(one.places, one.name)) if not judged.idle else None
            if judged.idle:
                why = f"{judged.idle} devices have nothing to do"
            elif judged.excess > 0:
                why = f"does not fit: {1 + judged.excess:.2f} times a device's memory"
            else:
                assert prediction is not None
                why = why_slower(self.prediction, prediction)
            rows.append({"name": one.name, "seconds_per_step": judged.seconds, "feasible": judged.usable, "why": why})
        return rows

    def record(self) -> dict[str, Any]:
        prediction, found = self.prediction, self.found
        calls = [
            {
                "call": one.call,
                "mode": one.mode,
                "ranks": list(p.ranks),
                "dp": p.dp,
                "tp": p.tp,
                "pp": p.pp,
                "stages": list(p.stages),
                "start_s": one.start_s,
                "seconds": one.seconds,
                "bytes": one.bytes,
                "terms": one.terms,
            }
            for one in prediction.calls
            for p in one.placements
        ]
        moves = [
            {"name": one.call, "kind": one.kind, "start_s": one.start_s, "seconds": one.seconds, "bytes": one.bytes}
            for one in prediction.calls
            if not one.placements
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
            "evaluations": found.evaluations if found else 1,
            "seconds_spent": found.seconds if found else 0.0,
        }

    def _calibration(self) -> dict[str, Any]:
        found = self.planning.calibration
        return {"source": found.source, "error": found.error, "kinds": dict(found.kinds), "runs": found.runs}

    def _numbers(self) -> str:
        """Where seconds come from, and how far off they have been."""
        found = self.planning.calibration
        if found.error is None:
            return found.source
        said = f"off by {found.error:.0%} in the mean" if found.runs else f"expected to be off by {found.error:.0%}"
        kinds = ", ".join(f"{kind} {error:.0%}" for kind, error in found.kinds.items())
        return f"{found.source}; {said}{f' ({kinds})' if kinds else ''}"

    def text(self) -> str:
        prediction = self.prediction
        cluster = self.planning.cluster
        lines = [
            f"plan {self.plan.name} on {cluster.name} ({self.plan.num_ranks} devices), predicted",
            f"step          {prediction.seconds_per_step:.4g} s",
            f"tokens        {self.tokens_per_s:,.0f} a second, of prompts and responses",
        ]
        if (price := self.price_of_1000_steps) is not None:
            lines.append(f"1,000 steps   {price:,.2f}, at {cluster.price_per_device_hour:g} for a device's hour")
        sizes = self.planning.lengths
        lines.append(
            f"lengths       prompts of {sizes.prompts.mean:,.0f} tokens (at most {sizes.prompts.longest:,}), "
            f"responses of {sizes.responses.mean:,.0f} ({sizes.responses.longest:,})"
        )
        lines.append(f"numbers       {self._numbers()}; nothing of this was run")
        hidden = self.planning.nothing_to_hide(self.plan)
        lines.append(
            f"fusion        {f'nothing to hide: {hidden}' if hidden else 'scoring may begin beside generation'}"
        )
        if self.found is not None:
            how = "all of them" if self.found.stopped_by == "exhaustive" else f"in {self.found.seconds:.1f} s"
            lines.append(f"tried         {self.found.evaluations:,} plans, {how}")
        if not prediction.feasible:
            worst = max(prediction.memory, key=lambda one: one.peak_bytes)
            lines.append(
                f"does not fit  rank {worst.rank} would hold {human_bytes(worst.peak_bytes)} of "
                f"{human_bytes(worst.limit_bytes)}"
            )
        lines += ["", *self._calls_table(), "", *self._memory_table(), "", self._gantt().rstrip()]
        rows = [*self.alternatives(), *self.baseline_rows()]
        if rows:
            lines += ["", f"{'other plans':<18}{'seconds':>9}   why not"]
            lines += [f"{row['name']:<18}{row['seconds_per_step']:>9.4g}   {row['why']}" for row in rows]
        return "\n".join(lines) + "\n"

    def _calls_table(self) -> list[str]:
        header = (
            f"{'call':<20}{'ranks':<12}{'dp':>4}{'tp':>4}{'pp':>4}  {'after':<9}{'start':>9}{'seconds':>10}  most of it"
        )
        lines = [header]
        for one in self.prediction.calls:
            most = max(one.terms.items(), key=lambda item: item[1], default=("", 0.0))[0]
            times = f"{one.start_s:>9.3g}{one.seconds:>10.4g}  {most}"
            if not one.placements:
                lines.append(f"{one.call + ' (' + one.kind.lower() + ')':<52}   {times}")
            for p in one.placements:
                where = f"{p.ranks[0]}-{p.ranks[-1]}" if len(p.ranks) > 1 else f"{p.ranks[0]}"
                lines.append(f"{one.call:<20}{where:<12}{p.dp:>4}{p.tp:>4}{p.pp:>4}  {p.after:<9}{times}")
        return lines

    def _memory_table(self) -> list[str]:
        lines = [f"{'memory':<12}{'at most':>12}{'of':>12}  largest"]
        for ranks, one in _alike(self.prediction.memory):
            largest = sorted(one.terms.items(), key=lambda item: -item[1])[:3]
            terms = ", ".join(f"{what} {human_bytes(count)}" for what, count in largest)
            peak, limit = human_bytes(one.peak_bytes), human_bytes(one.limit_bytes)
            lines.append(f"{'rank ' + ranks:<12}{peak:>12}{limit:>12}  {terms}")
        return lines

    def _gantt(self) -> str:
        timeline = self.prediction.timeline
        spans = [span for span in timeline.spans if span.step == 1]
        ranks = sorted({span.rank for span in spans})
        shown = set(ranks[:: -(-len(ranks) // GANTT_RANKS)])
        return ascii_gantt(Timeline(tuple(replace(s) for s in spans if s.rank in shown)), 80)


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
    found: dict[str, float] = {}
    for one in prediction.calls:
        name = one.call if one.kind in CALLS else f"{one.call} ({one.kind.lower()})"
        found[name] = found.get(name, 0.0) + one.seconds
    return found


def _alike(memory: Sequence[RankMemory]) -> list[tuple[str, RankMemory]]:
    """Ranks that hold as much of everything, together."""
    groups: dict[tuple[object, ...], list[RankMemory]] = {}
    for one in memory:
        groups.setdefault((one.peak_bytes, *sorted(one.terms.items())), []).append(one)
    found = []
    for same in groups.values():
        ranks = [one.rank for one in same]
        whole = ranks == list(range(ranks[0], ranks[-1] + 1)) and len(ranks) > 1
        found.append((f"{ranks[0]}-{ranks[-1]}" if whole else _some(ranks), same[0]))
    return found


def _some(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks[:3])) + ("…" if len(ranks) > 3 else "")

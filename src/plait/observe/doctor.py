"""The numerics doctor: reads the numbers of each step and says, in one sentence each, what is off and where to look.

A finding is said once, and again only when it gets worse or has lasted `repeat_every` steps. All that the doctor knows
stands in the rows that it gives out, so that `Doctor.restore` takes it up where an interrupted run was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.observe.doctor_agreement import explained, metrics_diagnosis
from plait.observe.doctor_reading import BASELINES, FIRST_DIFF, Diagnosis, Reading, Severity, Sign, limits_of
from plait.observe.doctor_rules import RULES, SILENT_BESIDE
from plait.observe.doctor_settings import DoctorSettings
from plait.observe.run_log import damaged, read_steps

ALARM = "rollout_mismatch"
"""The rule whose cause a probe may name."""
_WORSE = 2.0
"""How many times as bad a sign must be to be said again."""


@dataclass(frozen=True)
class Finding:
    """What the doctor says of a step."""

    rule: str
    """Its name; that of the cause, where one is found: `stale_sampler_weights` rather than `rollout_mismatch`."""
    severity: Severity
    step: int
    sentence: str
    key: str
    """The recipe key to look at."""
    value: float

    def __str__(self) -> str:
        return f"doctor: {self.severity}, step {self.step}, {self.rule}: {self.sentence} (look at `{self.key}`)"


@dataclass
class _Course:
    """A rule's signs so far."""

    name: str
    key: str
    first_step: int
    last_step: int
    streak: int
    severity: Severity | None
    """The highest."""
    worst: float
    how_bad: float
    last_how_bad: float
    same: int = 0
    """How many steps in a row have been so bad."""
    said_step: int | None = None
    said_severity: Severity | None = None
    said_how_bad: float = 0.0

    def asks_for_a_word(self, step: int, sign: Sign, repeat_every: int) -> bool:
        if sign.severity is None:
            return False
        if self.said_step is None or self.said_severity is None:
            return True
        return (
            sign.severity.rank > self.said_severity.rank
            or sign.how_bad > _WORSE * self.said_how_bad
            or step - self.said_step >= repeat_every
        )


@dataclass(frozen=True)
class SummaryRow:
    rule: str
    severity: Severity
    first_step: int
    last_step: int
    worst: float
    key: str


class Doctor:
    """See the top of the file.

    Args:
        dtype: of the run's compute; with the temperature of its samples it decides how far engine and trainer may be
            apart.
    """

    def __init__(
        self, settings: DoctorSettings | None = None, dtype: str = "bfloat16", temperature: float = 1.0
    ) -> None:
        self.settings = settings or DoctorSettings()
        self.limits = limits_of(self.settings, dtype, temperature)
        self.baseline: dict[str, float | str] = {}
        """First values, by name."""
        self._courses: dict[str, _Course] = {}
        self._rows: list[dict[str, Any]] = []

    def examine(
        self,
        step: int,
        metrics: Mapping[str, float],
        probe: Callable[[Reading], Diagnosis | None] = lambda reading: None,
    ) -> list[Finding]:
        """What is new to say of a step.

        Args:
            step: counted from 1.
            metrics: the step's, with the runtime's facts under `doctor/`.
            probe: looks for the cause of a mismatch between engine and trainer; called only when one is to be said.
        """
        for name, metric in BASELINES.items():
            first = metrics.get(metric, math.nan)  # nothing can be held to what is no number
            if math.isfinite(first) and (step == 1 or name != FIRST_DIFF):  # later there have been updates
                self.remember(step, name, float(first))
        reading = Reading(step, metrics, self.baseline, self.settings, self.limits, *self._streaks(step))
        findings = []
        seen: set[str] = set()
        for rule, check in RULES.items():
            sign = check(reading) if SILENT_BESIDE.get(rule) not in seen else None
            if sign is None:
                continue
            seen.add(rule)
            course = self._courses.get(rule)
            speaks = course is None or course.asks_for_a_word(step, sign, self.settings.repeat_every)
            speaks = speaks and sign.severity is not None
            if rule == ALARM and speaks:
                sign = explained(sign, probe(reading) or metrics_diagnosis(reading))
            row = {
                "step": step,
                "rule": rule,
                "name": course.name if course is not None and not speaks else sign.name or rule,
                "severity": sign.severity,
                "value": sign.value,
                "how_bad": sign.how_bad,
                "key": sign.key if speaks or course is None else course.key,
            }
            if speaks:
                row["sentence"] = sign.sentence
                assert sign.severity is not None
                findings.append(Finding(row["name"], sign.severity, step, sign.sentence, sign.key, sign.value))
            self._add(row)
            self._rows.append(row)
        return findings

    def remember(self, step: int, name: str, value: float | str) -> None:
        """Keep a value of the run's beginning; a name that has one keeps it."""
        if name not in self.baseline:
            self.baseline[name] = value
            self._rows.append({"step": step, "baseline": {name: value}})

    def take_rows(self) -> list[dict[str, Any]]:
        """What is to be written, once each: one row per sign of a step, said or not, and per baseline."""
        rows, self._rows = self._rows, []
        return rows

    def read(self, path: Path) -> list[Finding]:
        """`restore` from the file of a run. Raises DataError: it is damaged."""
        rows = read_steps(path)
        try:
            return self.restore(rows)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(path, repr(error)) from error

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> list[Finding]:
        """Take up the state that these rows tell, in the order in which `take_rows` gave them; what was said."""
        findings = []
        for row in rows:
            if "baseline" in row:
                self.baseline |= {
                    name: value if name not in BASELINES else float(value) for name, value in row["baseline"].items()
                }
                continue
            self._add(row)
            if (sentence := row.get("sentence")) is not None:
                severity, value = Severity(row["severity"]), float(row["value"])
                findings.append(Finding(row["name"], severity, row["step"], sentence, row["key"], value))
        return findings

    def summary(self) -> list[SummaryRow]:
        """Every rule that has had something to say, the gravest first."""
        rows = [
            SummaryRow(c.name, c.severity, c.first_step, c.last_step, c.worst, c.key)
            for c in self._courses.values()
            if c.severity is not None
        ]
        return sorted(rows, key=lambda row: (-row.severity.rank, row.first_step, row.rule))

    def summary_text(self) -> str:
        """The summary as a table; empty if there is nothing to say."""
        summary = self.summary()
        if not summary:
            return ""
        table = [("doctor", "severity", "first step", "last step", "worst", "advice")]
        for row in summary:
            steps = str(row.first_step), str(row.last_step)
            table.append((row.rule, row.severity, *steps, f"{row.worst:.3g}", f"look at `{row.key}`"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
        return "\n".join(line.rstrip() for line in lines)

    def _streaks(self, step: int) -> tuple[dict[str, int], dict[str, tuple[float, int]]]:
        """`streaks` and `before` of a `Reading`."""
        going_on = {rule: course for rule, course in self._courses.items() if course.last_step == step - 1}
        streaks = dict.fromkeys(RULES, 1) | {rule: course.streak + 1 for rule, course in going_on.items()}
        return streaks, {rule: (course.last_how_bad, course.same) for rule, course in going_on.items()}

    def _add(self, row: Mapping[str, Any]) -> None:
        """A row's sign joins its rule's course: the one place where the state changes, live or restored."""
        step, rule = int(row["step"]), str(row["rule"])
        severity = None if row["severity"] is None else Severity(row["severity"])
        value, how_bad = float(row["value"]), float(row["how_bad"])
        course = self._courses.get(rule)
        if course is None:
            course = _Course(row["name"], row["key"], step, step, 0, severity, value, how_bad, how_bad)
            self._courses[rule] = course
        goes_on = course.last_step == step - 1
        course.streak = course.streak + 1 if goes_on else 1
        course.same = course.same + 1 if goes_on and course.last_how_bad == how_bad else 1
        course.last_how_bad = how_bad
        course.last_step, course.name, course.key = step, row["name"], row["key"]
        if severity is not None and (course.severity is None or severity.rank > course.severity.rank):
            course.severity = severity
        if how_bad > course.how_bad:
            course.worst, course.how_bad = value, how_bad
        if "sentence" in row:
            course.said_step, course.said_severity, course.said_how_bad = step, severity, how_bad

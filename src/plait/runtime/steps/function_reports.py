"""What a run tells of functions: their calls as actions in the trace, and in words what went wrong with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from plait.rewards.scores import GroupScores
from plait.schedule.busy import BESIDE
from plait.workers.recorder import Recorder

TOLD = 3
"""Failures of one kind that are told one by one. Behind them the tenth is told, the hundredth, and so on: a service
that is away fails on every sample, and each failure has many lines."""


class FunctionReports:
    """Call it for each group that functions are done with.

    Args:
        tell: shows a text beside the run's progress.
    """

    def __init__(self, recorder: Recorder, tell: Callable[[str], None]) -> None:
        self._recorder, self._tell = recorder, tell
        self._counts = Counter[tuple[str, str]]()
        """(function, kind of failure) → how often it has come."""

    def __call__(self, call: str, role: str, group: GroupScores) -> None:
        """Record what functions did for a group as actions of `call`, each worker of `role` in a lane of its own, or as
        many as it has calls under way; say what failed, and what a group failed on and none of its samples."""
        for span in group.worked:
            beside = f"{BESIDE}{span.beside}" if span.beside else ""
            lane = f"{role} worker {span.worker}{beside}"
            self._recorder.add(f"{call}/{span.function}", "SCORE", role, lane, span.start_s, span.end_s)
        for failure in group.failures:
            self._count(f"{role}/{failure.function}", failure.kind, str(failure))
        for text in group.recovered:
            self._count(role, "recovered", text)

    def _count(self, function: str, kind: str, text: str) -> None:
        self._counts[function, kind] += 1
        count = self._counts[function, kind]
        if count < TOLD:
            self._tell(text)
        elif count == TOLD:
            self._tell(f"{text}\n(further failures of this kind are counted; the 10th, the 100th, … is shown)")
        elif str(count).strip("0") == "1":
            self._tell(f"failure {count:,} of its kind: {text}")

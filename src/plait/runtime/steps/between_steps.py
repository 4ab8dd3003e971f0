"""What a run does between its steps: an evaluation, a look of its doctor. It is driven and recorded as steps are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from plait.observe.progress import ProgressSink
from plait.schedule.dispatch import Clock, Task, run_alone
from plait.schedule.work import Result, Work
from plait.workers.recorder import Recorder


@dataclass(frozen=True)
class BetweenSteps:
    """Drives works beside which nothing else is to be done; what they do is recorded as of no step."""

    clock: Clock
    recorder: Recorder
    progress: ProgressSink
    """Where it is shown."""

    def run(self, name: str, work: Work[Result], ranks: Collection[int] = (), role: str = "") -> Result:
        """To the end of a work; its result.

        Args:
            name: for records and errors.
            ranks: that may compute for it beside the leader.
            role: for records.

        Raises:
            RunError: nothing has come from other ranks for long; and what the work raises.
        """
        return self.run_task(Task(((0, 0),), name, work, frozenset(ranks), role))

    def run_task(self, task: Task) -> Any:
        """The same of a task, which says as it runs which ranks it keeps busy."""
        with self.recorder.of_no_step():
            return run_alone(task, self.clock)

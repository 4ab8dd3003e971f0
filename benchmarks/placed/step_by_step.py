"""Runs that stand beside each other and step in turns: what tells them apart is then not what a machine does between
one minute and the next. A run waits before each step until it is asked for it; meanwhile it computes nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from placed.runs import DEADLINE_S, Finished, RunFailed, end, finish, said_in, start
from plait.runtime import controller
from plait.runtime.controller import Outcome
from plait.runtime.processes import worker
from plait.runtime.session import Session

POLL_S = 0.005
OVER = "over"
"""A file in the folder of a job of which no step is asked any more."""


class Worker(worker.Worker):
    """Of a run that waits before each step."""

    def run(self) -> Outcome | None:
        with patch.object(controller, "run_step", when_asked):
            return super().run()


def when_asked(session: Session, step: Any = controller.run_step) -> dict[str, float]:
    """Take a step once it is asked for. Raises RunFailed where it never is."""
    folder, number, deadline = session.directory.path.parent, session.done.step + 1, time.monotonic() + DEADLINE_S
    (folder / f"ready-{number}").touch()
    while not (folder / f"go-{number}").exists():
        if (folder / OVER).exists() or time.monotonic() > deadline:
            raise RunFailed(f"step {number} was never asked for")
        session.workers.tick()
        time.sleep(POLL_S)
    metrics: dict[str, float] = step(session)
    return metrics


@dataclass
class Stepping:
    """A run under way. folder: of its job"""

    process: subprocess.Popen[bytes]
    folder: Path
    done: int = 0

    def ready(self) -> None:
        """Wait until the run stands before its next step, or has ended. Raises RunFailed."""
        deadline = time.monotonic() + DEADLINE_S
        while not (self.folder / f"ready-{self.done + 1}").exists() and self.process.poll() is None:
            if time.monotonic() > deadline:
                raise RunFailed(f"a run in {self.folder} is not ready after {DEADLINE_S:.0f} s")
            time.sleep(POLL_S)
        if self.process.poll():
            raise RunFailed(f"a run ended with {self.process.poll()}; the end of its output:\n{said_in(self.folder)}")

    def step(self) -> None:
        """Have it take a step. Raises RunFailed."""
        self.done += 1
        (self.folder / f"go-{self.done}").touch()
        self.ready()


def in_turns(recipes: Sequence[Mapping[str, Any]], places: Sequence[Path], warm_up: int) -> list[Finished]:
    """Runs of as many steps each, step by step; who comes first changes with each. Raises RunFailed."""
    runs = []
    try:
        for recipe, place in zip(recipes, places, strict=True):
            job = {"recipe": dict(recipe), "launched": True, "step_by_step": True}
            runs.append(Stepping(start(job, place), place))
        for run in runs:
            run.ready()
        for number in range(recipes[0]["steps"]):
            first = number % len(runs)
            for run in runs[first:] + runs[:first]:
                run.step()
        return [finish(run.process, run.folder, warm_up) for run in runs]
    finally:
        for run in runs:
            (run.folder / OVER).touch()
        end(*(run.process for run in runs))

"""What the benchmarks of training steps share: a side's process as the comparing one sees it, and table rows."""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from grpo.measure import Ready, Seconds, StepReport

DEADLINE_S = 1800.0
"""For loading, and for one step."""


Differing = Callable[[str, int, Any, Any], list[str]]
"""(side, number of the step, its report, the workload) → a line for everything that is not as the workload says."""


class SideError(Exception):
    """A side died, or missed its deadline."""


class Side:
    """A side's process.

    Args:
        module: what it runs; its only argument is `workload_file`.
        report: the class of its answers.
        python: the interpreter that has what the side needs.

    Raises:
        SideError: here or in a step.
    """

    def __init__(
        self,
        name: str,
        workload_file: Path,
        threads: int,
        log_file: Path,
        *,
        module: str,
        report: type[StepReport] = StepReport,
        python: str = sys.executable,
    ) -> None:
        self.name = name
        self.steps: list[StepReport] = []
        self._log_file = log_file
        self._report = report
        folder = Path(__file__).resolve().parent
        paths = [str(folder), str(folder.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(log_file, "wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", module, str(workload_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env={**os.environ, **environment, **offline, "PYTHONPATH": os.pathsep.join(paths)},
            )
        self.ready = Ready(**self._receive())

    def step(self) -> StepReport:
        assert self._process.stdin is not None
        self._process.stdin.write(b"step\n")
        self.steps.append(self._report.of(self._receive()))
        return self.steps[-1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _receive(self) -> dict:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            what = "ended" if readable else f"gave no answer for {DEADLINE_S:.0f} s"
            tail = self._log_file.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SideError(f"the side `{self.name}` {what}; the end of its output:\n{tail}")
        return json.loads(line)


def compare(opened: Iterable[Side], workload: Any, differing: Differing, report: Callable[..., str]) -> int:
    """Let the sides do their steps in turns, and print the report; returns the exit code of the benchmark.

    Args:
        opened: the sides; each is opened when it is its turn, and closed at the end.
        workload: what both work on; it says `num_steps`, the warm-up step included.
        differing: tells how a step is not as the workload says, a line each.
        report: makes the report of the sides and the workload.

    Returns:
        0; 1 when a side did other work than was asked; 2 when one failed.
    """
    sides: list[Side] = []
    try:
        for side in opened:
            sides.append(side)
        differences = in_turns(sides, workload, differing)
    except SideError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        for side in sides:
            side.close()
    print(report(sides, workload))
    for line in differences:
        print(line, file=sys.stderr)
    return 1 if differences else 0


def in_turns(sides: Sequence[Side], workload: Any, differing: Differing) -> list[str]:
    """The steps of all sides. Returns how the work done differs from the work asked."""
    differences = []
    for number in range(workload.num_steps):
        for side in sides if number % 2 else list(reversed(sides)):
            done = side.step()
            which = f"step {number}" if number else "warm-up"
            total = sum(seconds.wall for seconds in done.phases.values())
            phases = ", ".join(f"{phase} {seconds.wall:.2f}" for phase, seconds in done.phases.items())
            print(f"{which} {side.name}: {total:.2f} s ({phases})", file=sys.stderr)
            differences += differing(side.name, number, done, workload)
    return differences


def median_seconds(steps: Sequence[StepReport], phase: str | None = None) -> Seconds:
    """Over steps, of one phase or of the whole step."""
    picked = [list(step.phases.values()) if phase is None else [step.phases[phase]] for step in steps]
    return Seconds(*(median(sum(getattr(s, kind) for s in seconds) for seconds in picked) for kind in ("wall", "cpu")))


def row(title: str, cells: Sequence[str], ratio: str = "") -> str:
    return f"{title:<26}" + "".join(f"{cell:>18}" for cell in cells) + f"{ratio:>16}".rstrip()


def memory_rows(sides: Sequence[Side]) -> list[str]:
    """Peak resident memory, the ratio of the second side to the first."""
    last = [side.steps[-1] for side in sides]
    lines = []
    for what, peaks in (
        ("peak memory after imports", [side.ready.imported_bytes for side in sides]),
        ("after loading", [side.ready.loaded_bytes for side in sides]),
        ("after the steps", [step.max_rss_bytes for step in last]),
        ("of these above imports", [side.steps[-1].max_rss_bytes - side.ready.imported_bytes for side in sides]),
    ):
        ratio = f"{peaks[1] / peaks[0]:.2f}" if len(peaks) > 1 else ""
        lines.append(row(what, [f"{peak / 1e6:.0f} MB" for peak in peaks], ratio))
    return lines


def warning_of_load(sides: Sequence[Side], threads: int) -> list[str]:
    """Lines that say that the machine was busy, if wall time tells so."""
    seconds = [median_seconds(side.steps[1:]) for side in sides]
    lent = max(whole.wall / whole.cpu for whole in seconds)
    if threads > 1 or lent <= 1.05:
        return []
    return ["", f"The machine was busy: wall time up to {lent:.2f} times CPU time. Not figures to publish."]


def positive(text: str) -> int:
    """A command-line number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {value}")
    return value

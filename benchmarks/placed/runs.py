"""A run of a recipe in a process of its own, and the phases of its steps as its folder tells them.

    python -m placed.runs JOB.json

JOB: `recipe`; `launched`: by the launcher also where the plan has one rank; `by_turns`, `step_by_step`: see there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from placed.ceiling import Phases
from plait.dataflow import CallName
from plait.observe.run_log import read_rows
from plait.schedule.timeline import Span, load_any

DEADLINE_S = 3600.0
PATIENCE_S = 60.0


class RunFailed(Exception):
    """A run ended with an error, or took too long."""


@dataclass(frozen=True)
class Finished:
    """A run's folder, and what its own process used."""

    run_dir: Path
    warm_up: int
    """Steps that do not count."""
    controller_cpu_s: float
    """Of the process that was started, from the first step's preparation to the end; of a run in one process, all."""

    def steps(self) -> list[float]:
        """Seconds of each step that counts."""
        rows = read_rows(self.run_dir / "metrics.jsonl")
        return [float(row["timing_s/step"]) for row in rows if row["step"] > self.warm_up]

    def spans(self) -> list[list[Span]]:
        """Of each step that counts, of all ranks."""
        timeline = load_any(self.run_dir / "trace.json")
        numbers = sorted({span.step for span in timeline.spans if span.step is not None and span.step > self.warm_up})
        return [[span for span in timeline.spans if span.step == number] for number in numbers]

    def phases(self) -> Phases:
        """Medians over the steps."""
        phases_of_steps = [phases_of(spans, seconds) for spans, seconds in zip(self.spans(), self.steps(), strict=True)]
        middle = lambda name: median(getattr(phases, name) for phases in phases_of_steps)
        times = [middle(name) for name in ("step", "generate", "score", "train", "optimizer")]
        return Phases(*times, *(round(middle(f"{name}_micro_batches")) for name in ("score", "train")))

    def received_bytes(self, kinds: tuple[str, ...]) -> float:
        """By the rank that receives most in actions of these kinds; the median over the steps."""
        totals = []
        for spans in self.spans():
            by_rank: dict[int, int] = {}
            for span in spans:
                if span.kind in kinds:
                    by_rank[span.rank] = by_rank.get(span.rank, 0) + span.bytes
            totals.append(max(by_rank.values(), default=0))
        return median(totals) if totals else 0.0


def phases_of(spans: list[Span], step_s: float) -> Phases:
    """The phases of one step. A span belongs to the call that its action begins with."""
    totals = {name: dict.fromkeys({span.rank for span in spans}, 0.0) for name in _PHASES}
    counts = {name: dict.fromkeys({span.rank for span in spans}, 0) for name in _PHASES}
    for span in spans:
        if (name := _phase_of(span)) is not None:
            totals[name][span.rank] += span.duration_s
            counts[name][span.rank] += span.kind in ("SCORE", "TRAIN", "F")
    generate, score, train, optimizer = (max(totals[name].values(), default=0.0) for name in _PHASES)
    scored, trained = (max(1, *counts[name].values(), 0) for name in ("score", "train"))
    return Phases(step_s, generate, score, train, optimizer, scored, trained)


_PHASES = ("generate", "score", "train", "optimizer")


def _phase_of(span: Span) -> str | None:
    call = CallName.of(span.whole).asks
    if call == "generate":
        return "generate"
    if call == "train":
        return "optimizer" if span.kind == "STEP" else "train"
    return "score" if call in ("logprobs", "values", "score") else None


def run_alone(job: Mapping[str, Any], place: Path, warm_up: int) -> Finished:
    """Whatever breaks the run off, no process of it is left. Raises RunFailed."""
    [done] = run_beside([job], [place], warm_up)
    return done


def run_beside(jobs: Sequence[Mapping[str, Any]], places: Sequence[Path], warm_up: int) -> list[Finished]:
    """As `run_alone`, several at the same time."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for job, place in zip(jobs, places, strict=True):
            processes.append(start(job, place))
        return [finish(process, place, warm_up) for process, place in zip(processes, places, strict=True)]
    finally:
        end(*processes)


def start(job: Mapping[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    """Start a run whose processes have one thread each; `finish` waits for it, and `end` must follow."""
    folder.mkdir(parents=True)
    file = folder / "job.json"
    file.write_text(json.dumps({**job, "recipe": {**job["recipe"], "run_dir": str(folder / "run")}}))
    here = Path(__file__).resolve().parents[1]
    paths = [str(here), str(here.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return begin(["-m", "placed.runs", str(file)], folder, environment | {"PYTHONPATH": os.pathsep.join(paths)})


def begin(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start Python with these arguments, and these variables beside its own; what it says goes to the folder's log."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(folder / "log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **offline, **environment},
        )


def said_in(folder: Path) -> str:
    """The end of what the processes of a folder said."""
    return (folder / "log").read_text(errors="replace")[-3000:]


def finish(process: subprocess.Popen[bytes], folder: Path, warm_up: int) -> Finished:
    """Wait for a run. Its weights are not kept: those of all runs of a benchmark would fill a disk.

    Raises:
        RunFailed: with the end of the run's output.
    """
    try:
        code = process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"a run in {folder} took more than {DEADLINE_S:.0f} s") from error
    if code != 0:
        raise RunFailed(f"a run ended with {code}; the end of its output:\n{said_in(folder)}")
    for weights in ("final", "checkpoints"):
        shutil.rmtree(folder / "run" / weights, ignore_errors=True)
    return Finished(folder / "run", warm_up, json.loads((folder / "cpu.json").read_text()))


def end(*processes: subprocess.Popen[bytes]) -> None:
    """Have runs end that have not, and wait until none is left; one that does not in a minute is killed."""
    going = [process for process in processes if process.poll() is None]
    for process in going:
        process.terminate()
    for process in going:
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main(file: Path) -> None:
    from plait.recipes.recipe import Recipe
    from plait.runtime.api import run
    from plait.runtime.folder.claim import claim
    from plait.runtime.prepare import prepare
    from plait.runtime.processes import supervisor

    job = json.loads(file.read_text())
    recipe = Recipe.model_validate(job["recipe"])
    if not job["launched"]:
        begun = time.process_time()
        run(recipe)
    else:
        for way in ("by_turns", "step_by_step"):
            if job.get(way):
                supervisor.Worker = import_module(f"placed.{way}").Worker  # type: ignore[misc]
        with claim(recipe, resume=False) as directory:
            prepared = prepare(recipe)
            begun = time.process_time()
            supervisor.supervise(prepared, directory, resume=False)
    (file.parent / "cpu.json").write_text(json.dumps(time.process_time() - begun))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

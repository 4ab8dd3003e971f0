"""A run of GRPO after `plait profile`: seconds of a step and peak memory beside what was forecast of them.

The profile and the metrics of each step are results of their own, written as soon as they are there. The run is stopped
behind its last step: to save it would take longer than its steps do. If time is up before, what it has done counts.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from placed.recipes import grpo_of

from on_device.job import SHAPES, Job, random_ids
from plait.cost.kept_profiles import keep_profile, load_profile
from plait.observe.run_log import read_steps
from plait.recipes.recipe_file import load_recipe
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import Kept
from plait.runtime.prediction.forecast import STEP, Beside, Forecast, write_forecast
from plait.runtime.prepare import prepare
from plait.schedule.plan import Plan

STEPS = 6
GOALS = {"s": 0.15, "GB": 0.05}
SPARE_S = 20.0
"""Left at the end to lay the forecast beside what was measured."""
RECORDED = ("perf/", "timing_s/")
"""Metrics of a step that are a result."""


def main() -> int:
    job = Job.read()
    for shape in job.shapes:
        forecast = run(job, shape)
        step = next(one for one in forecast.calls if one.name == STEP)
        print(f"{shape}: {said(step, 's', 1.0)}, by {forecast.source}")
        for one in forecast.calls:
            if one is not step:
                print(f"{shape}: {said(one, 's', 1.0)}")
        for kind, found in (("call", forecast.calls), ("memory", forecast.memory)):
            for one in found:
                predicted = {"predicted": one.predicted, "measured": one.measured}
                job.record("predicted", shape, kind=kind, name=one.name, source=forecast.source, **predicted)
        for one in forecast.memory:
            print(f"{shape}, rank {said(one, 'GB', 1e9)}")
    return 0


def run(job: Job, shape: str) -> Forecast:
    """Profile the shape, train it some steps, and read what was forecast."""
    folder, recipe = write_recipe(job, shape)
    quick = ["--quick"] if job.is_tiny else []
    began, profile = time.monotonic(), folder / "profile.json"
    how = ["--dtype", job.dtype, "--device", job.device, *quick]
    _plait("profile", "--model", job.model(shape), *how, "--out", str(profile))
    seconds, found = time.monotonic() - began, load_profile(profile)
    job.record("predicted", shape, kind="profile", seconds=seconds, profile=found.model_dump(mode="json"))
    keep_profile(found)
    files = RunFiles(folder / "run")
    steps = train(job, shape, recipe, files)
    print(f"{shape}: `plait profile` took {seconds:.0f} s; {steps} of {STEPS} steps", flush=True)
    plan = Plan.load(files.plan)
    prepared = prepare(load_recipe(recipe), kept=Kept(plan, plan))
    write_forecast(replace(prepared, plan=plan), files.path, read_steps(files.metrics))
    return Forecast.load(files.forecast)


def write_recipe(job: Job, shape: str) -> tuple[Path, Path]:
    """The folder of a shape's run, and in it the recipe."""
    folder, model = Path(job.folder) / f"run-{shape}", job.model(shape)
    shutil.rmtree(folder, ignore_errors=True)  # of another command, whose steps are not these
    folder.mkdir()
    prompts, samples, prompt_tokens, tokens = (2, 2, 8, 6) if job.is_tiny else (16, 8, 128, 256)
    words = [random_ids(prompt_tokens, SHAPES[shape].vocabulary, uid) for uid in range(prompts)]
    texts = [" ".join(f"w{token_id}" for token_id in ids) for ids in words]
    recipe = grpo_of(folder, model, texts, samples=samples, steps=STEPS + 1, tokens=tokens)
    recipe |= {
        "dtype": job.dtype,
        "device": job.device,
        "devices": 1,
        "run_dir": str(folder / "run"),
        "overwrite": True,
    }
    if not job.is_tiny:
        recipe["micro_batch_tokens"] = 16_384
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return folder, path


def train(job: Job, shape: str, recipe: Path, files: RunFiles) -> int:
    """Train until STEPS steps are done, or time is up; how many were. Their metrics are recorded as they come.

    Raises:
        RuntimeError: the run failed, whatever it has done before; or time was up before any step was done.
    """
    command = [sys.executable, "-m", "plait", "train", str(recipe)]
    process, rows = subprocess.Popen(command, stdout=sys.stderr), list[dict[str, Any]]()
    try:
        while len(rows) < STEPS and time.time() < job.ends - SPARE_S:
            ended = process.poll() is not None
            known, rows = len(rows), read_steps(files.metrics)[:STEPS] if files.metrics.is_file() else []
            for row in rows[known:]:
                metrics = {name: value for name, value in row.items() if name.startswith(RECORDED)}
                job.record("predicted", shape, kind="step", step=row["step"], **metrics)
            if ended:
                break
            time.sleep(0.1)
        if process.returncode and len(rows) < STEPS:
            raise RuntimeError(f"the run failed behind step {len(rows)} of {STEPS}: exit code {process.returncode}")
    finally:
        process.kill()
        process.wait()
    if not rows:
        raise RuntimeError("expected a step to be done, found none: time was up")
    return len(rows)


def said(beside: Beside, unit: str, per: float) -> str:
    """One line: predicted, measured, how far off."""
    if beside.predicted is None or beside.measured is None or beside.error is None:
        return f"{beside.name}: predicted {beside.predicted}, measured {beside.measured}"
    return (
        f"{beside.name}: predicted {beside.predicted / per:.4g} {unit}, measured {beside.measured / per:.4g} {unit}, "
        f"off by {beside.error:+.1%} (goal {GOALS[unit]:.0%})"
    )


def _plait(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "plait", *arguments], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

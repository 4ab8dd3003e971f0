"""A run of GRPO after `plait profile`: seconds of a step and peak memory beside what was forecast of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from placed.recipes import grpo_of

from on_device.job import SHAPES, Job, random_ids
from plait.runtime.prediction.forecast import STEP, Beside, Forecast

STEPS = 6
GOALS = {"s": 0.15, "GB": 0.05}


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
                foretold = {"predicted": one.predicted, "measured": one.measured}
                job.record("predicted", shape, kind=kind, name=one.name, source=forecast.source, **foretold)
        for one in forecast.memory:
            print(f"{shape}, rank {said(one, 'GB', 1e9)}")
    return 0


def run(job: Job, shape: str) -> Forecast:
    """Profile the shape, train it some steps, and read what was forecast."""
    folder, model = Path(job.folder) / f"run-{shape}", job.model(shape)
    folder.mkdir(exist_ok=True)
    prompts, samples, prompt_tokens, tokens = (2, 2, 8, 6) if job.is_tiny else (16, 8, 128, 256)
    words = [random_ids(prompt_tokens, SHAPES[shape].vocabulary, uid) for uid in range(prompts)]
    texts = [" ".join(f"w{token_id}" for token_id in ids) for ids in words]
    recipe = grpo_of(folder, model, texts, samples=samples, steps=STEPS, tokens=tokens)
    recipe |= {
        "dtype": job.dtype,
        "device": job.device,
        "devices": 1,
        "run_dir": str(folder / "run"),
        "overwrite": True,
    }
    if not job.is_tiny:
        recipe["micro_batch_tokens"] = 16_384
    (folder / "recipe.json").write_text(json.dumps(recipe))
    quick = ["--quick"] if job.is_tiny else []
    _plait("profile", "--model", model, "--dtype", job.dtype, "--device", job.device, *quick)
    _plait("train", str(folder / "recipe.json"))
    return Forecast.load(folder / "run" / "forecast.json")


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

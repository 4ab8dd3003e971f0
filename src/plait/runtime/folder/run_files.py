"""The files of a run, by name.

RUN_DIR/
    recipe.yaml                resolved: every key with its value
    metrics.jsonl              one row per training step
    evaluations.jsonl          one row per evaluation; step 0 is the one before the first step
    samples/step-000001.jsonl  text, tokens, log-probs, rewards, advantages of each sample of a step
    samples/eval-000001.jsonl  the same of an evaluation's items
    trace.json                 Chrome trace of every action
    doctor.jsonl               what the numerics doctor knows and said
    rewards.log                what reward functions print
    checkpoints/               see `checkpoint.store`
    best/, final/              Hugging Face folders
    merged/                    of a stage with adapters: its whole final weights, which later stages begin with
    run.json, code/            see `history`
    moments.jsonl              where samples stood that went on with new weights
    fusion.jsonl               when the last samples of each rollout were gathered, and why
    rebalancing.jsonl          which samples instances gave to others, and why
    forecast.json              seconds of calls and kinds of actions, memory of ranks: predicted beside measured
    summary.txt                what the command printed at the end
    workers/rank0.log          of a run on several devices: what each of its processes printed
    run.lock                   locked by the process that works here (`run_lock`)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.errors import ConfigError
from plait.recipes.stages import FINAL

RECIPE, METRICS, TRACE = "recipe.yaml", "metrics.jsonl", "trace.json"
EVALUATIONS = "evaluations.jsonl"
PLAN = "plan.json"
FORECAST = "forecast.json"
FUSION = "fusion.jsonl"
REBALANCING = "rebalancing.jsonl"
MOMENTS = "moments.jsonl"
DECISIONS = (FUSION, REBALANCING, MOMENTS)
"""Files of what depended on the clock."""
DOCTOR = "doctor.jsonl"
REWARD_OUTPUT = "rewards.log"
SUMMARY = "summary.txt"
WORKERS, OLD_WORKERS = "workers", ".workers.old"
"""What ranks printed: those of the newest stay; and of the run before, until another one begins in its place."""
SAMPLES, CHECKPOINTS, BEST = "samples", "checkpoints", "best"
_TOLD_BY = 20
"""Steps of a run whose samples say how those of others are."""


class RunFiles:
    """Where each thing of the run in a folder lies, there or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / RECIPE
        self.plan = path / PLAN
        self.forecast = path / FORECAST
        self.fusion = path / FUSION
        self.rebalancing = path / REBALANCING
        self.moments = path / MOMENTS
        self.metrics = path / METRICS
        self.evaluations = path / EVALUATIONS
        self.trace = path / TRACE
        self.doctor = path / DOCTOR
        self.reward_output = path / REWARD_OUTPUT
        self.checkpoints = path / CHECKPOINTS
        self.best = path / BEST
        self.final = path / FINAL
        self.workers = path / WORKERS
        self.old_workers = path / OLD_WORKERS

    @property
    def saved(self) -> tuple[Path, ...]:
        """The folder, and where in it steps are saved."""
        return self.path, self.checkpoints, self.best, self.final

    def samples(self, step: int) -> Path:
        return self.path / SAMPLES / f"step-{step:06d}.jsonl"

    def evaluation_samples(self, step: int) -> Path:
        return self.path / SAMPLES / f"eval-{step:06d}.jsonl"


def newest_samples(folder: Path, option: str) -> list[Path]:
    """Files of the samples of a run's last steps, twenty at most, the oldest first.

    Args:
        option: by which the folder was given, for messages.

    Raises:
        ConfigError: there are none.
    """
    files = sorted((folder / SAMPLES).glob("step-*.jsonl"))[-_TOLD_BY:]
    if not files:
        raise ConfigError(f"{option}: {folder} has no samples of steps (`{SAMPLES}/step-*.jsonl`); give a run's folder")
    return files


def samples_of(folder: Path, steps: Sequence[int]) -> list[Path]:
    """Files of the samples of some steps of a run: of twenty at most, evenly spread over those that have one."""
    files = [file for step in steps if (file := RunFiles(folder).samples(step)).is_file()]
    count = min(len(files), _TOLD_BY)
    return [files[(2 * number + 1) * len(files) // (2 * count)] for number in range(count)]

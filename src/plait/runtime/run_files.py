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
    forecast.json              seconds of each call as the plan foretold them, beside those measured, where it did
    summary.txt                what the command printed at the end
    run.lock                   locked by the process that works here (`run_lock`)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
SAMPLES, CHECKPOINTS, BEST = "samples", "checkpoints", "best"


@dataclass(frozen=True)
class RunFiles:
    """Where each thing of the run in a folder lies, there or not."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / RECIPE

    @property
    def plan(self) -> Path:
        return self.path / PLAN

    @property
    def forecast(self) -> Path:
        return self.path / FORECAST

    @property
    def fusion(self) -> Path:
        return self.path / FUSION

    @property
    def rebalancing(self) -> Path:
        return self.path / REBALANCING

    @property
    def moments(self) -> Path:
        return self.path / MOMENTS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def evaluations(self) -> Path:
        return self.path / EVALUATIONS

    @property
    def trace(self) -> Path:
        return self.path / TRACE

    @property
    def doctor(self) -> Path:
        return self.path / DOCTOR

    @property
    def reward_output(self) -> Path:
        return self.path / REWARD_OUTPUT

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def best(self) -> Path:
        return self.path / BEST

    @property
    def final(self) -> Path:
        return self.path / FINAL

    def samples(self, step: int) -> Path:
        return self.path / SAMPLES / f"step-{step:06d}.jsonl"

    def evaluation_samples(self, step: int) -> Path:
        return self.path / SAMPLES / f"eval-{step:06d}.jsonl"

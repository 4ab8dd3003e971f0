"""Random batches of samples for a tiny model, and trainers over it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import Column, Level
from plait.models.model import Model
from plait.schedule.work import Done, Work
from plait.training.mini_batch import LossCall, LossTerm
from plait.training.settings import OptimizerSettings
from plait.training.trainer import Trainer
from plait.training.trainer_settings import ExecutionSettings, SampleSettings, UpdateSettings

MAX_RESPONSE_TOKENS = 12
NO_CLIP = float("inf")
ADVANTAGES = Column("advantages", Level.SAMPLE, 2, 0)
OLD = Column("actor_logprobs", Level.TOKEN, 3, 0)
REF = Column("ref_logprobs", Level.TOKEN, 4, 0)


def token_mean(batch: Any) -> Any:
    """A loss: the mean of the log-probs of what is trained on."""
    return batch.aggregate(batch.logprobs, "token-mean")


def random_rows(
    num_prompts: int = 4,
    samples_per_prompt: int = 3,
    *,
    seed: int = 0,
    vocab: int = 300,
    empty: bool = False,
    root: int = 0,
) -> Rows:
    """Prompts of 2 … 9 tokens behind `root` that all begin with, responses of 1 … 12 (one of them empty, if asked),
    made-up log-probs, old and ref."""
    rng = np.random.default_rng(seed)
    samples = []
    for uid in range(num_prompts):
        own = tuple(rng.integers(3, vocab, rng.integers(2, 10)).tolist())
        prompt = Prompt(10 + uid, "", (*(3 + 7 * i % (vocab - 3) for i in range(root)), *own))
        for index in range(samples_per_prompt):
            length = 0 if empty and (uid, index) == (1, 1) else int(rng.integers(1, MAX_RESPONSE_TOKENS + 1))
            ids = tuple(rng.integers(3, vocab, length).tolist())
            logprobs = tuple((-5 + rng.normal(size=length)).tolist())
            samples.append(Sample(prompt, index, ids, logprobs, "", FinishReason.STOP))
    rows = Rows(tuple(samples))
    return rows.with_column(ADVANTAGES, rng.normal(size=len(rows)))


def with_policy_columns(rows: Rows, logprobs: np.ndarray, *, seed: int = 1, spread: float = 0.3) -> Rows:
    """Old and reference log-probs near `logprobs`, so that ratios fall on both sides of the clip range."""
    rng = np.random.default_rng(seed)
    near = [logprobs + spread * rng.normal(size=len(logprobs)) for _ in range(2)]
    return rows.with_column(OLD, near[0]).with_column(REF, near[1])


def make_trainer(model: Model, **overrides: Any) -> Trainer:
    """A trainer without gradient clipping and with a rate of 1e-3; keys of its settings, or of Trainer."""
    given = {
        "learning_rate": 1e-3,
        "max_grad_norm": NO_CLIP,
        "micro_batch_tokens": 64,
        "temperature": 0.7,
        "total_optimizer_steps": 100,
        "max_response_tokens": MAX_RESPONSE_TOKENS,
    } | overrides

    def taken(names: Iterable[str]) -> dict[str, Any]:
        return {name: given.pop(name) for name in list(names) if name in given}

    optimizer = OptimizerSettings(**taken(OptimizerSettings.model_fields))
    execution, samples, updates = (
        taken(field.name for field in fields(settings))
        for settings in (ExecutionSettings, SampleSettings, UpdateSettings)
    )
    return Trainer(
        model, ExecutionSettings(**execution), SampleSettings(**samples), UpdateSettings(optimizer, **updates), **given
    )


def scorer(model: Model, micro_batch_tokens: int, temperature: float, role: str = "ref") -> Trainer:
    """The trainer of a frozen role."""
    return Trainer(model, ExecutionSettings(micro_batch_tokens), SampleSettings(temperature), role=role)


def train(
    trainer: Trainer,
    rows: Rows,
    columns: Mapping[str, Column],
    loss: Callable[..., Any],
    *,
    mini_batches: int = 1,
    epochs: int = 1,
    step: int = 0,
    **asked: Any,
) -> Work[dict[str, float]]:
    """`Trainer.train` by one loss, with keys of LossCall."""
    term = LossTerm(rows, LossCall(loss, columns, **asked), mini_batches, epochs)
    (metrics,) = yield from trainer.train([term], step=step)
    return metrics


def evaluate(
    trainer: Trainer, rows: Rows, columns: Mapping[str, Column], loss: Callable[..., Any], **asked: Any
) -> Work[dict[str, float]]:
    """`Trainer.evaluate`, with keys of LossCall."""
    return trainer.evaluate(rows, LossCall(loss, columns, **asked))


def run_all(generator: Generator[Done, None, Any]) -> tuple[list[Done], Any]:
    """Run a call to its end: what it did, and what it returned."""
    done = []
    while True:
        try:
            done.append(next(generator))
        except StopIteration as stop:
            return done, stop.value

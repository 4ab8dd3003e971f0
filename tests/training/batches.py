"""Random batches of samples for a tiny model, and trainers over it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.dataflow import Column, Level
from plait.models.language_model import LanguageModel
from plait.training.settings import OptimizerSettings
from plait.training.trainer import Done, Trainer

MAX_RESPONSE_TOKENS = 12
NO_CLIP = float("inf")
ADVANTAGES = Column("advantages", Level.SAMPLE, 2, 0)
OLD = Column("actor_logprobs", Level.TOKEN, 3, 0)
REF = Column("ref_logprobs", Level.TOKEN, 4, 0)


def random_rows(
    num_prompts: int = 4, samples_per_prompt: int = 3, *, seed: int = 0, vocab: int = 300, empty: bool = False
) -> Rows:
    """Prompts of 2 … 9 tokens, responses of 1 … 12 (one of them empty, if asked), made-up log-probs, old and ref."""
    rng = np.random.default_rng(seed)
    samples = []
    for uid in range(num_prompts):
        prompt = Prompt(10 + uid, "", tuple(rng.integers(3, vocab, rng.integers(2, 10)).tolist()))
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


def make_trainer(model: LanguageModel, **overrides: Any) -> Trainer:
    """A trainer without gradient clipping and with a rate of 1e-3; keys of OptimizerSettings or of Trainer."""
    keys = set(OptimizerSettings.model_fields)
    settings: dict[str, Any] = {"learning_rate": 1e-3, "max_grad_norm": NO_CLIP}
    settings |= {name: value for name, value in overrides.items() if name in keys}
    given: dict[str, Any] = {
        "micro_batch_tokens": 64,
        "temperature": 0.7,
        "total_optimizer_steps": 100,
        "max_response_tokens": MAX_RESPONSE_TOKENS,
    }
    given |= {name: value for name, value in overrides.items() if name not in keys}
    return Trainer(model, OptimizerSettings(**settings), **given)


def run_all(generator: Generator[Done, None, Any]) -> tuple[list[Done], Any]:
    """Run a call to its end: what it did, and what it returned."""
    done = []
    while True:
        try:
            done.append(next(generator))
        except StopIteration as stop:
            return done, stop.value

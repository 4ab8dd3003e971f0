"""Samples of prompts that are made of other samples: a judge, a second attempt after a critique, on any plan, with batches
drawn ahead, and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.runtime.api import run
from tests.runs.plans import assert_equal_columns, assert_equal_runs, metrics_of, planned
from tests.runs.written import samples_of

FLOWS = """
import math

import numpy as np

from plait.algorithms.losses import policy_loss
from plait.dataflow import grades_from, per_group, per_sample, prompts_from


def judged(prompts, actor, judge, ref):
    samples = actor.generate(prompts)
    verdicts = judge.generate(prompts_from(samples, asks), samples_per_prompt=1, greedy=True, max_tokens=4)
    trained(actor, samples, grades_from(samples, counts, name="grade", verdicts=verdicts), ref)


def trained(actor, samples, grades, ref):
    advantages = per_group(centred, grades, name="advantages")
    keep = per_sample(is_read, grades, name="keep")
    actor.train(samples, loss=loss, advantages=advantages, keep=keep, ref_logprobs=ref.logprobs(samples))


def asks(prompts, completions):
    return [f"{prompt} {completion} how many?" for prompt, completion in zip(prompts, completions)]


def counts(completions, verdicts):
    assert len(completions) == len(verdicts)
    return [None if not of_one[0] else float(np.mean([len(text) for text in of_one])) for of_one in verdicts]


def centred(grades):
    return np.nan_to_num(grades - np.nanmean(grades)) if np.isfinite(grades).any() else np.zeros(len(grades))


def is_read(grade):
    return float(math.isfinite(grade))


def loss(batch, advantages, ref_logprobs):
    values = -advantages * batch.logprobs + 0.01 * (batch.logprobs - ref_logprobs) ** 2
    return batch.aggregate(values, "token-mean")
"""


@pytest.fixture
def make(tiny_folder: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """`make("judged", "name of the run", plan)`."""
    (tmp_path / "flows.py").write_text(FLOWS)
    rows = [{"prompt": f"what is {i} plus 4?", "solution": str(i + 4)} for i in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def get(flow: str, name: str, plan: dict[str, str] | None = None, **keys: Any) -> Recipe:
        tree = {
            "model": str(tiny_folder),
            "algorithm": f"{tmp_path}/flows.py:{flow}",
            "steps": 2,
            "prompts_per_step": 3,
            "data.source": str(tmp_path / "sums.jsonl"),
            "optimizer.learning_rate": 1e-3,
            "micro_batch_tokens": 64,
            "threads": 1,
            "samples_per_prompt": 4,
            "sampling.max_response_tokens": 6,
        }
        return planned(
            lambda **all_keys: load_recipe(None, list((tree | all_keys).items())), tmp_path, name, plan, **keys
        )

    return get


def test_a_first(make: Callable[..., Recipe]) -> None:
    recipe = make("judged", "one", steps=2)
    run(recipe)
    for row in samples_of(recipe, 1):
        print({k: v for k, v in row.items() if k not in ("prompt_ids", "sampling_logprobs")})
    print(metrics_of(recipe.run_dir)[0])

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
from tests.cases import slow_but
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


def by_itself(prompts, actor, ref):
    samples = actor.generate(prompts)
    verdicts = actor.generate(prompts_from(samples, asks), samples_per_prompt=2)
    sure = per_sample(total, ref.logprobs(verdicts), name="sure")
    grades = grades_from(samples, weighed, name="grade", verdicts=verdicts, sure=sure)
    trained(actor, samples, grades, ref)


def again(prompts, actor, ref, reward):
    samples = actor.generate(prompts)
    critiques = ref.generate(prompts_from(samples, asks), samples_per_prompt=1)
    attempts = actor.generate(prompts_from(critiques, asks_again), samples_per_prompt=2)
    first, second = reward.score(samples), reward.score(attempts)
    gained = per_group(gain, second, first, name="gained")
    actor.train(samples, loss=of_first, advantages=per_group(centred, first, name="first"))
    actor.train(attempts, loss=of_first, advantages=gained)


def trained(actor, samples, grades, ref):
    advantages = per_group(centred, grades, name="advantages")
    keep = per_sample(is_read, grades, name="keep")
    actor.train(samples, loss=loss, advantages=advantages, keep=keep, ref_logprobs=ref.logprobs(samples))


def asks(prompts, completions):
    return [f"{prompt} {completion} how many?" for prompt, completion in zip(prompts, completions)]


def counts(completions, verdicts):
    assert len(completions) == len(verdicts)
    return [None if not of_one[0] else float(np.mean([len(text) for text in of_one])) for of_one in verdicts]


def total(logprobs):
    return float(logprobs.sum())


def weighed(verdicts, sure):
    assert len(sure) == 2 * len(verdicts)
    return [sum(len(text) * s for text, s in zip(of_one, own)) for of_one, own in zip(verdicts, sure.reshape(-1, 2))]


def asks_again(prompts, completions, solution):
    return [[{"role": "user", "content": f"{p} {c} {s}?"}] for p, c, s in zip(prompts, completions, solution)]


def gain(second, first):
    [before] = first
    return second - before


def of_first(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")


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


PLANS: dict[str, dict[str, str]] = {
    "dp": {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "judge.generate": "0,1 dp2", "ref.logprobs": "0,1 dp2"},
    "elsewhere": {"actor.generate": "0", "actor.train": "0,1 dp2", "judge.generate": "1", "ref.logprobs": "1"},
    "tp": {"actor.generate": "0,1 dp2", "actor.train": "0,1 tp2", "judge.generate": "0,1 tp2", "ref.logprobs": "0"},
    "pp": {"actor.generate": "0,1 pp2", "actor.train": "0,1 pp2", "judge.generate": "0,1 pp2", "ref.logprobs": "1"},
}


@pytest.mark.parametrize("name", slow_but(("elsewhere",), PLANS))
def test_a_plan_changes_nothing(make: Callable[..., Recipe], name: str) -> None:
    one = make("judged", "one")
    run(one)
    two = make("judged", "two", PLANS[name], micro_batch_tokens=150)
    run(two)
    assert_equal_runs(two.run_dir, one.run_dir)
    assert_equal_columns(two.run_dir, one.run_dir)


def test_several_verdicts_of_the_policy(make: Callable[..., Recipe]) -> None:
    one = make("by_itself", "one")
    run(one)
    for row in samples_of(one, 1):
        print({k: v for k, v in row.items() if k not in ("prompt_ids", "sampling_logprobs")})
    print(metrics_of(one.run_dir)[0])

def test_again(make: Callable[..., Recipe], tmp_path) -> None:
    (tmp_path / "reward.py").write_text("def length(completions, **columns):\n    return [*map(len, completions)]\n")
    one = make("again", "one", **{"reward.functions": [f"{tmp_path}/reward.py:length"]})
    run(one)
    for row in samples_of(one, 1)[10:18] + samples_of(one, 1)[-4:]:
        print({k: v for k, v in row.items() if k not in ("prompt_ids", "sampling_logprobs")})
    print(metrics_of(one.run_dir)[0])

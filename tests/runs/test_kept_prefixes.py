"""Prefixes that an instance keeps from one call to the next, where some of its ranks had to make room between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.runs.plans import assert_equal_runs, runs_of_flows

Make = Callable[..., Recipe]

FLOWS = """
from plait.dataflow import parse_grades, per_group, per_sample, build_prompts


def twice(prompts, actor, ref):
    samples = actor.generate(prompts)
    logprobs = ref.logprobs(samples)
    sure = per_sample(total, logprobs, name="sure")
    others = actor.generate(build_prompts(samples, repeated), samples_per_prompt=1)
    grades = parse_grades(samples, lengths, name="grade", others=others)
    advantages = per_group(centred, grades, sure, name="advantages")
    actor.train(samples, loss=loss, advantages=advantages, ref_logprobs=logprobs)


def between(prompts, actor, ref):
    for _ in range(2):
        samples = actor.generate(prompts)
        logprobs = ref.logprobs(samples)
        advantages = per_group(centred, per_sample(total, logprobs, name="sure"), name="advantages")
        actor.train(samples, loss=loss, advantages=advantages, ref_logprobs=logprobs)


def repeated(prompts, completions):
    return [prompt for prompt in prompts]


def total(logprobs):
    return float(logprobs.sum())


def lengths(completions, others):
    return [float(sum(sum(map(ord, text)) % 13 for text in texts)) for texts in others]


def centred(*grades):
    return sum(grade - grade.mean() for grade in grades)


def loss(batch, advantages, ref_logprobs):
    return batch.aggregate(-advantages * batch.logprobs + 0.1 * (batch.logprobs - ref_logprobs) ** 2, "token-mean")
"""


@pytest.fixture
def make(tiny_folder: Path, tmp_path: Path) -> Make:
    rows = [{"prompt": f"what is {i} plus 4, and what is {i} plus 5?"} for i in range(6)]
    keys: dict[str, Any] = {"sampling.prefix_cache_tokens": 300, "stalled_after_s": 20}
    return runs_of_flows(FLOWS, rows, tiny_folder, tmp_path, **keys)


CASES: dict[str, tuple[str, dict[str, str]]] = {
    "one-rank-makes-room": (
        "twice",
        {"actor.train": "0", "actor.generate": "1,2 pp2 after=drop", "ref.logprobs": "2"},
    ),
    "trained-between": ("between", {"actor.train": "0", "actor.generate": "1", "ref.logprobs": "0"}),
}
"""Weights that come as messages alone, to one rank of an instance after it has dropped them; and those of a training
within the step."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_prefixes_are_those_of_the_weights_that_are_there(case: str, make: Make) -> None:
    flow, plan = CASES[case]
    plain, placed = make(flow, "plain"), make(flow, "placed", plan)
    run(plain)
    run(placed)
    assert_equal_runs(placed.run_dir, plain.run_dir)

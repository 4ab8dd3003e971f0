"""A flow whose functions and loss draw random numbers: the same run again, after a resume and on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.runs.plans import assert_equal_runs, planned

FLOW = """
import random

import numpy as np
import torch

from plait.dataflow import Resample, per_group


def flow(prompts, actor, reward):
    samples = actor.generate(prompts, resample=Resample(keep=by_lot, reward=reward, max_rounds=5))
    advantages = per_group(shaken, reward.score(samples), name="advantages")
    actor.train(samples, loss=of_some_tokens, epochs=2, advantages=advantages)


def by_lot(scores):
    return random.random() < 0.6


def shaken(scores):
    return scores - scores.mean() + np.random.normal(size=len(scores)) + random.random()


def of_some_tokens(batch, advantages):
    is_taken = torch.rand(advantages.shape) < 0.5
    batch.log("taken", is_taken.double())
    return batch.aggregate(-batch.logprobs * advantages * is_taken, "token-mean")
"""


@pytest.mark.parametrize("places", [None, pytest.param("0,1 tp2", marks=pytest.mark.slow)])
def test_they_draw_the_same(make_recipe: Callable[..., Recipe], tmp_path: Path, places: str | None) -> None:
    """Ranks that share a layer each call the loss: had they drawn apart, each would have had another gradient."""
    (tmp_path / "own.py").write_text(FLOW)
    keys = {"algorithm": f"{tmp_path}/own.py:flow", "options": {}, "checkpoint.every": 1}
    one = planned(make_recipe, tmp_path, "one", **keys, steps=3)
    run(one)
    plan = None if places is None else {"actor.generate": places, "actor.train": places}
    run(planned(make_recipe, tmp_path, "other", plan, **keys, steps=1))
    other = planned(make_recipe, tmp_path, "other", plan, **keys, steps=3)
    run(other, resume=True)
    assert_equal_runs(other.run_dir, one.run_dir)

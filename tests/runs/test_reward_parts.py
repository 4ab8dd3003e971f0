"""A flow that takes the scores of each reward function by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import FlowError
from plait.models.files.saving import save_pretrained
from plait.models.scalar_loading import load_scalar
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from tests.runs.written import samples_of

FLOW = """
import numpy as np

from plait.dataflow import per_batch, per_group, Resample


def normalised(prompts, actor, reward):
    samples = actor.generate(prompts, resample=Resample(keep=differs, reward=reward))
    scores = reward.score(samples)
    parts = [per_group(centred, scores.of(name), name=f"of/{name}") for name in NAMES]
    actor.train(samples, loss=loss, advantages=per_batch(added, *parts, name="advantages"))


def of_a_critic(prompts, actor, critic, reward):
    samples = actor.generate(prompts)
    parts = critic.score(samples).of("length"), reward.score(samples)
    actor.train(samples, loss=loss, advantages=per_batch(added, *parts, name="advantages"))


def turns_of_a_critic(prompts, actor, critic, reward):
    samples = actor.generate(prompts)
    parts = critic.score(samples).by_turn, reward.score(samples)
    actor.train(samples, loss=loss, advantages=per_batch(added, *parts, name="advantages"))


def differs(scores):
    return np.ptp(scores) > 0


def centred(scores):
    return np.nan_to_num(scores - np.nanmean(scores))


def added(*parts):
    return sum(parts)


def loss(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")
"""
REWARDS = """
def length(completions, **columns):
    return [float(len(text)) for text in completions]


def vowels(completions, **columns):
    return [float(text.count("a") + text.count("e")) if len(text) % 3 else None for text in completions]
"""


@pytest.fixture
def recipe_of(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    def make(names: tuple[str, ...], **keys: Any) -> Recipe:
        (tmp_path / "flow.py").write_text(f"{FLOW}\n\nNAMES = {names!r}\n")
        (tmp_path / "rewards.py").write_text(REWARDS)
        given = {"algorithm": f"{tmp_path}/flow.py:normalised", "options": {}, "steps": 1}
        given["reward.functions"] = [f"{tmp_path}/rewards.py:length", f"{tmp_path}/rewards.py:vowels"]
        return make_recipe(**(given | {"reward.weights": [0.5, 2.0]} | keys))

    return make


@pytest.mark.slow
def test_each_reward_by_itself(recipe_of: Callable[..., Recipe], tiny_folder: Path, tmp_path: Path) -> None:
    """Before its weight, and NaN where it does not apply; the model of a reward is one of them."""
    save_pretrained(load_scalar(str(tiny_folder), dtype="float32", head_std=1.0), tmp_path / "judge")
    names = ("length", "vowels", "model")
    recipe = recipe_of(names, **{"reward.model": str(tmp_path / "judge")})
    run(recipe)
    samples = samples_of(recipe, 1)
    assert {sample["rewards/vowels"] is None for sample in samples} == {True, False}
    for sample in samples:
        for name in names:
            told = sample[f"rewards/{name}"]
            assert sample[f"reward_score/{name}"] == ("NaN" if told is None else pytest.approx(told))
        assert sample["advantages"] == pytest.approx(sum(sample[f"of/{name}"] for name in names))


def test_a_reward_that_there_is_not_is_named_before_the_run(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    said = r"asks reward.score for the scores of `lenght` alone \(did you mean `length`\?\); it has those of: le"
    with pytest.raises(FlowError, match=said):
        prepare(recipe_of(("lenght",)))
    said = r"critic.score for the scores of `length` alone; only the roles reward and cost score by functions"
    with pytest.raises(FlowError, match=said):
        prepare(recipe_of((), algorithm=f"{tmp_path}/flow.py:of_a_critic"))
    said = r"critic.score for the scores of turns \(`by_turn`\); only the roles reward and cost score by functions"
    with pytest.raises(FlowError, match=said):
        prepare(recipe_of((), algorithm=f"{tmp_path}/flow.py:turns_of_a_critic"))


def test_a_function_by_the_name_of_the_scores_of_a_model_has_another(
    recipe_of: Callable[..., Recipe], tiny_folder: Path, tmp_path: Path
) -> None:
    save_pretrained(load_scalar(str(tiny_folder), dtype="float32", head_std=1.0), tmp_path / "judge")
    (tmp_path / "named.py").write_text("def model(completions, **columns):\n    return [1.0] * len(completions)\n")
    keys = {"reward.functions": [f"{tmp_path}/named.py:model"], "reward.weights": []}
    assert [of.name for of in prepare(recipe_of(("model",), **keys)).functions["reward"]] == ["model"]
    keys["reward.model"] = str(tmp_path / "judge")
    prepared = prepare(recipe_of(("model", "model#2"), **keys))
    assert [of.name for of in prepared.functions["reward"]] == ["model#2"]

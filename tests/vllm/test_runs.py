"""Runs whose samples another engine draws: the stand-in computes as plait's own does, so they are the same runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.runtime.api import evaluate_model, run
from plait.runtime.prepare import prepare
from plait.vllm.environment import VARIABLE
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.conftest import make_recipe, tiny_folder  # noqa: F401
from tests.runs.test_reply_errors import dropping
from tests.runs.written import samples_of
from tests.vllm.stand_in import standing_in

MakeRecipe = Callable[..., Recipe]
SAME = ("reward", "kl", "actor/grad_norm", "training/rollout_probs_diff_mean", "actor/entropy")


def rows(recipe: Recipe, keys: tuple[str, ...] = SAME) -> list[dict[str, Any]]:
    lines = (recipe.run_dir / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line)[key] for key in keys} for line in lines]


def tokens(recipe: Recipe, step: int) -> list[Any]:
    told = ("token_ids", "replies", "turns", "reply_error")
    return [tuple(row.get(name) for name in told) for row in samples_of(recipe, step)]


def samples(recipe: Recipe, step: int) -> str:
    """With their log-probs, to the bit."""
    return (recipe.run_dir / f"samples/step-{step:06d}.jsonl").read_text()


@pytest.mark.slow
def test_adapters_of_experts_are_merged_on_the_way(
    make_recipe: MakeRecipe,  # noqa: F811
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    pytest.importorskip("peft")
    save_tiny(tmp_path / "mixture", family="qwen3_moe", weight_scale=0.05)
    lora = {"rank": 2, "target_modules": ["all-linear", "experts.gate_up_proj", "experts.down_proj"]}
    keys = {"model": str(tmp_path / "mixture"), "lora": lora, "steps": 2, "optimizer.learning_rate": 1e-2}
    own = make_recipe(**keys, run_dir=str(tmp_path / "own"))
    run(own)
    other = make_recipe(**keys, run_dir=str(tmp_path / "other"), **{"sampling.engine": "vllm"})
    with standing_in(monkeypatch):
        run(other)
    assert [tokens(other, step) for step in (1, 2)] == [tokens(own, step) for step in (1, 2)]
    for mine, theirs in zip(rows(own), rows(other), strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4)


@pytest.mark.parametrize("turns", slow_but([True], [False, True]), ids=["one turn", "several turns"])
def test_a_run_is_the_run_of_our_own_engine(
    make_recipe: MakeRecipe,  # noqa: F811
    tmp_path: Path,
    monkeypatch: Any,
    turns: bool,
) -> None:
    keys = {"evaluation.items": 2, "steps": 2} | (dropping(tmp_path) if turns else {})
    own = make_recipe(**keys, run_dir=str(tmp_path / "own"))
    run(own)
    other = make_recipe(**keys, run_dir=str(tmp_path / "other"), **{"sampling.engine": "vllm"})
    with standing_in(monkeypatch) as opened:
        run(other)
    assert [tokens(other, step) for step in (1, 2)] == [tokens(own, step) for step in (1, 2)]
    for mine, theirs in zip(rows(own), rows(other), strict=True):
        assert theirs == pytest.approx(mine, abs=1e-5)
    for what in (1, 3):
        assert any(told[what] for told in tokens(other, 2)) is turns
    (group,) = opened
    assert group.is_closed
    updates = [said for said in group.worker.said if said == "update_weights"]
    assert len(updates) == 3, "for the gate and the first step, the second, and the last evaluation"


def test_a_run_that_is_resumed_draws_what_it_would_have_drawn(
    make_recipe: MakeRecipe,  # noqa: F811
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    keys: dict[str, Any] = {"sampling.engine": "vllm", "checkpoint.every": 1}
    whole = make_recipe(**keys, steps=2, run_dir=str(tmp_path / "whole"))
    parts = [make_recipe(**keys, steps=steps, run_dir=str(tmp_path / "parts")) for steps in (1, 2)]
    with standing_in(monkeypatch):
        run(whole)
        run(parts[0])
        run(parts[1], resume=True)
        with pytest.raises(ConfigError, match=r"begun with other values of `sampling.engine`"):
            run(
                make_recipe(**keys | {"sampling.engine": "plait"}, steps=3, run_dir=str(tmp_path / "parts")),
                resume=True,
            )
    assert [samples(parts[1], step) for step in (1, 2)] == [samples(whole, step) for step in (1, 2)]


def test_an_evaluation_by_itself_ends_its_engine(make_recipe: MakeRecipe, monkeypatch: Any) -> None:  # noqa: F811
    keys = {"evaluation.items": 2}
    with standing_in(monkeypatch) as opened:
        evaluation = evaluate_model(make_recipe(**keys, **{"sampling.engine": "vllm"}))
    assert [sample.token_ids for sample in evaluation.samples] == [
        sample.token_ids for sample in evaluate_model(make_recipe(**keys)).samples
    ]
    assert [group.is_closed for group in opened] == [True]


def test_an_engine_that_is_off_is_refused(make_recipe: MakeRecipe, monkeypatch: Any) -> None:  # noqa: F811
    recipe = make_recipe(**{"sampling.engine": "vllm"})
    with (
        standing_in(monkeypatch, heat=4.0) as opened,
        pytest.raises(
            ConfigError, match=r"over \d+ tokens of 64 samples .* expected at most 0.001 \(`doctor.rollout_pro"
        ),
    ):
        run(recipe)
    assert opened[0].is_closed
    assert not (recipe.run_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize("plan", ["split", "auto"])
def test_what_it_never_does_is_said_before_it_is_looked_for(
    plan: str,
    make_recipe: MakeRecipe,  # noqa: F811
    monkeypatch: Any,
) -> None:
    """Nobody installs it only to learn that; and no plan is searched for it."""
    monkeypatch.setenv(VARIABLE, "/no/such/python")
    monkeypatch.setattr("plait.runtime.prepare.auto_plan", None)
    with pytest.raises(ConfigError, match=rf"^the plan `{plan}` .* is of 2 devices, but `sampling.engine` is vllm"):
        prepare(make_recipe(devices=2, plan=plan, **{"sampling.engine": "vllm"}))

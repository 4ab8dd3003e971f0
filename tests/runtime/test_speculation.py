"""Training with drafts is training without: the same tokens, metrics and weights, on one device and on several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.runtime.placed_runs import GRPO, recipe_in, where
from tests.runtime.plans import assert_equal_runs

STEPS = 6
"""Of 3 among 12 prompts: a pass and a half."""

HOW: dict[str, dict[str, Any]] = {
    "auto": {"sampling.speculation": "auto"},
    "five": {"sampling.speculation": 5},
    "chunks": {"sampling.speculation": 3, "sampling.max_prefill_tokens": 7, "sampling.max_running": 5},
    "a pool of keys that is too small": {"sampling.speculation": 4, "sampling.kv_tokens": 96},
    "a pool of texts that is too small": {"sampling.speculation": 4, "sampling.draft_pool_bytes": 1 << 16},
}
PLACES = {
    "instances": {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0"},
    "tp2": {"actor.generate": "1,0 tp2", "actor.train": "0,1 dp2", "ref.logprobs": "0"},
    "pp2": {"actor.generate": "0,1 pp2", "actor.train": "0", "ref.logprobs": "1"},
}


def recipe_of(place: Path, tiny_folder: Path, run_dir: str, **keys: Any) -> Recipe:
    # Cold, so that a model of random weights says some of what it said before.
    base = {"steps": STEPS, "sampling.max_response_tokens": 12, "sampling.temperature": 0.1}
    return recipe_in(place, tiny_folder, "grpo", run_dir, **(GRPO[1] | base | keys))


@pytest.fixture(scope="module")
def plain(place: Path, tiny_folder: Path) -> Path:
    recipe = recipe_of(place, tiny_folder, "plain")
    run(recipe)
    return Path(recipe.run_dir)


def accepted(run_dir: Path) -> float:
    return sum(row.get("perf/spec/accepted_tokens", 0.0) for row in read_rows(run_dir / "metrics.jsonl"))


@pytest.mark.parametrize("how", HOW)
def test_a_run_with_drafts_is_the_run_without(how: str, place: Path, tiny_folder: Path, plain: Path) -> None:
    recipe = recipe_of(place, tiny_folder, how, **HOW[how])
    run(recipe)
    assert_equal_runs(Path(recipe.run_dir), plain)
    assert accepted(plain) == 0
    if how != "auto":
        assert accepted(Path(recipe.run_dir)) > 0


def test_in_exact_mode_to_the_bit(place: Path, tiny_folder: Path) -> None:
    keys = {"sampling.exact": True, "dtype": "float32", "steps": 4}
    recipes = [
        recipe_of(place, tiny_folder, f"exact-{how}", **keys, **{"sampling.speculation": how})
        for how in ("off", "auto", 4)
    ]
    for recipe in recipes:
        run(recipe)
    for recipe in recipes[1:]:
        assert_equal_runs(Path(recipe.run_dir), Path(recipes[0].run_dir), tolerance=0.0)


@pytest.mark.parametrize(
    "plan", ["tp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("instances", "pp2"))]
)
def test_all_ranks_take_the_same_drafts(plan: str, place: Path, tiny_folder: Path, plain: Path) -> None:
    keys = where(place, f"spec-{plan}", PLACES[plan]) | {"sampling.speculation": 4}
    recipe = recipe_of(place, tiny_folder, f"on-{plan}", **keys)
    run(recipe)
    assert_equal_runs(Path(recipe.run_dir), plain)
    assert accepted(Path(recipe.run_dir)) > 0


def test_a_resumed_run_has_lost_what_it_knew_and_nothing_else(place: Path, tiny_folder: Path, plain: Path) -> None:
    keys = {"sampling.speculation": 4, "checkpoint.every": 2}
    run(recipe_of(place, tiny_folder, "resumed", **keys, steps=4))
    recipe = recipe_of(place, tiny_folder, "resumed", **keys)
    run(recipe, resume=True)
    assert_equal_runs(Path(recipe.run_dir), plain)

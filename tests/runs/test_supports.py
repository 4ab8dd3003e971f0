"""Runs that draw by top-k, top-p and min-p: what is trained is what was drawn from, however that is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.runs.plans import assert_equal_runs
from tests.runs.test_resume import kill_and_resume
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]
FILTERS: dict[str, dict[str, Any]] = {
    "top_p": {"sampling.top_p": 0.9},
    "top_k": {"sampling.top_k": 20},
    "min_p": {"sampling.min_p": 0.5},
    "all": {"sampling.top_p": 0.9, "sampling.top_k": 20, "sampling.min_p": 0.3, "sampling.temperature": 0.7},
}
VOCABULARY = 320


@pytest.mark.parametrize("name", FILTERS)
def test_engine_and_trainer_agree_on_what_is_left(make_recipe: MakeRecipe, name: str) -> None:
    """Log-probs over the whole vocabulary would be off by the log of the mass that was cut: 0.1 and more."""
    recipe = make_recipe(**FILTERS[name], dtype="float64")
    assert run(recipe).finished
    for step, row in enumerate(logged(recipe), 1):
        assert row["training/rollout_logprobs_diff_max"] < 1e-9
        assert row["actor/ppo_kl"] == row["actor/pg_clipfrac"] == 0, "one update: the ratio is 1, to the bit"
        sizes = [size for sample in samples_of(recipe, step) for size in sample["support_sizes"]]
        assert row["support_size/mean"] == pytest.approx(sum(sizes) / len(sizes))
        assert row["support_size/max"] == max(sizes) < VOCABULARY
        assert row["actor/entropy"] < math.log(max(sizes)), "that of what is left"
    assert logged(recipe)[0]["kl"] == pytest.approx(0, abs=1e-9), "the reference is restricted to the same tokens"


def test_nothing_left_out_changes_no_bit(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """All tokens are kept, and told to be: the numbers are those of a run that filters nothing."""
    plain = make_recipe(run_dir=str(tmp_path / "plain"))
    whole = make_recipe(run_dir=str(tmp_path / "whole"), **{"sampling.top_k": VOCABULARY})
    assert run(plain).finished
    assert run(whole).finished
    assert_equal_runs(whole.run_dir, plain.run_dir, tolerance=0)
    assert all(size is None for sample in samples_of(whole, 1) for size in sample["support_sizes"])
    assert not any("support_sizes" in sample for sample in samples_of(plain, 1))


def test_drafts_change_no_sample(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    keys = {"dtype": "float64", "sampling.max_response_tokens": 24} | FILTERS["top_p"]
    plain = make_recipe(run_dir=str(tmp_path / "plain"), **keys, **{"sampling.speculation": "off"})
    drafted = make_recipe(run_dir=str(tmp_path / "drafted"), **keys, **{"sampling.speculation": 3})
    assert run(plain).finished
    assert run(drafted).finished
    assert_equal_runs(drafted.run_dir, plain.run_dir)
    for step in (1, 2):
        sizes = [[row["support_sizes"] for row in samples_of(recipe, step)] for recipe in (plain, drafted)]
        assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "keys",
    slow_but(
        [{"max_staleness": 1}],
        [
            {"max_staleness": 1},
            {"max_staleness": 2, "partial_rollout": "recompute"},
            {"options": {"dynamic_sampling": True}},
            {"algorithm": "ppo", "options": {"old_logprobs": "engine"}},
            {"algorithm": "remax"},
        ],
    ),
    ids=str,
)
def test_any_way_to_draw_and_train(make_recipe: MakeRecipe, keys: dict[str, Any]) -> None:
    recipe = make_recipe(dtype="float64", steps=3, **FILTERS["top_p"], **keys)
    assert run(recipe).finished
    rows = logged(recipe)
    assert rows[0]["training/rollout_logprobs_diff_max"] < 1e-9
    assert all(row["support_size/max"] < VOCABULARY for row in rows)


def test_turns_keep_what_each_was_drawn_from(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Replies stand between drawn tokens, and have no sets."""
    (tmp_path / "reply.py").write_text(
        'GO_ON = {"role": "user", "content": "go on"}\n\n'
        "def reply(messages, **columns):\n    return GO_ON if len(messages) < 5 else None\n"
    )
    keys = FILTERS["top_p"] | {"turns.reply": f"{tmp_path}/reply.py:reply", "sampling.max_response_tokens": 60}
    recipe = make_recipe(dtype="float64", **keys, **{"sampling.stop_token_ids": [*range(3, 300, 8)]})
    assert run(recipe).finished
    samples = samples_of(recipe, 1)
    assert any(len(sample["replies"]) > 1 for sample in samples)
    assert all(len(sample["support_sizes"]) == len(sample["token_ids"]) for sample in samples)
    for row in logged(recipe):
        assert row["training/rollout_logprobs_diff_max"] < 1e-9
        assert row["actor/ppo_kl"] == 0


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """With batches that were generated ahead, whose sets are in the checkpoint."""
    keys = FILTERS["top_p"] | {"max_staleness": 1, "checkpoint.every": 1}
    kill_and_resume(make_recipe, tmp_path, points=range(6), seed=3, steps=3, **keys)

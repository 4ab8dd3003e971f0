"""Several rewards of one sample, each of which is compared by itself (GDPO)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.algorithms import oracle
from tests.runs.placed_runs import where
from tests.runs.plans import assert_equal_columns, assert_equal_runs
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]

REWARDS = """
def length(completions, **columns):
    return [1000.0 * len(text) for text in completions]

def some(completions, **columns):
    return [None if len(text) % 3 == 0 else float(text.count("7")) for text in completions]

def broken(completions, **columns):
    return [float("nan") if len(text) % 5 == 0 else float(len(set(text))) for text in completions]
"""
WEIGHTS = {"length": 1.0, "some": 2.0, "broken": -0.5}
NORMALIZED = {"options": {"multi_objective_aggregation": "normalize_then_sum"}, "samples_per_prompt": 4}


def rewarded(folder: Path) -> dict[str, Any]:
    (folder / "several.py").write_text(REWARDS)
    functions = [f"{folder}/several.py:{name}" for name in WEIGHTS]
    return {"reward.functions": functions, "reward.weights": [*WEIGHTS.values()], "reward.on_error": "drop"}


def test_advantages_are_of_rewards_that_are_standardised_one_by_one(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """By hand, from the records: one reward is large, one does not apply to some samples, one fails on some, which are
    then no part of their group."""
    run(recipe := make_recipe(algorithm="grpo", steps=2, **NORMALIZED, **rewarded(tmp_path)))
    rows = samples_of(recipe, 2)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["uid"].split(".")[0], []).append(row)
    expected: dict[str, float] = {}
    for members in groups.values():
        kept = [row for row in members if "reward_score" in row]
        scores = [[row[f"rewards/{name}"] for row in kept] for name in WEIGHTS]
        expected |= zip([row["uid"] for row in kept], oracle.decoupled(scores, [*WEIGHTS.values()]), strict=True)
    assert 0 < len(expected) < len(rows), "some samples have no reward"
    assert any(row["rewards/some"] is None for row in rows if row["uid"] in expected)
    sums = np.array([*expected.values()])
    advantages = (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)
    of_sample = dict(zip(expected, advantages, strict=True))
    for row in (row for row in rows if row["uid"] in expected):
        assert row["reward_score_decoupled"] == pytest.approx(expected[row["uid"]], abs=1e-9)
        assert row["advantages"] == pytest.approx(of_sample[row["uid"]], abs=1e-9)
    assert logged(recipe)[1]["reward"] == pytest.approx(
        np.mean([row.get("reward_score", np.nan) for row in rows if "reward_score" in row])
    )


def test_one_sample_per_prompt_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(algorithm="grpo", **(NORMALIZED | {"samples_per_prompt": 1}), **rewarded(tmp_path))
    with pytest.raises(ConfigError, match=r"`samples_per_prompt` is 1, but `advantages` .* compares the samples"):
        run(recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"), [("gdpo-2", NORMALIZED["options"]), ("batch-2", {"scale_rewards": "batch"})]
)
def test_a_plan_changes_nothing(
    name: str, options: dict[str, Any], place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    """Beside a reward model, whose scores are one of the rewards."""
    keys = rewarded(place) | {"reward.model": "PLACE/scorer", "options": options}
    recipe = placed("grpo", name, **keys, **where(place, name, "split 2"))
    run(recipe)
    one = reference("grpo", **keys)
    assert_equal_runs(recipe.run_dir, one)
    assert_equal_columns(recipe.run_dir, one)

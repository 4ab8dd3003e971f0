"""What evaluations say about answers and functions of them is read by something, and measures something."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import ConfigError
from plait.recipes.flow_checks import checked_flow
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe

TASK = "reasoning_gym:chain_sum"


def recipe_of(algorithm: str, **keys: Any) -> Recipe:
    given: dict[str, Any] = {"model": "m", "algorithm": algorithm, "data.source": TASK, "evaluation.items": 2}
    if algorithm == "distill":
        given["reference.model"] = "teacher"
    given |= {key if "." in key else f"evaluation.{key}": value for key, value in keys.items()}
    return load_recipe(None, list(given.items()))


@pytest.mark.parametrize(
    ("algorithm", "keys", "said"),
    [
        ("grpo", {"functions": ["well_formed"]}, ""),
        ("grpo", {"functions": ["task"]}, r"^`evaluation.functions` names `task`, but so does the reward"),
        ("distill", {"functions": ["task"], "answer": "number"}, ""),
        ("distill", {"functions": ["task"], "reward.on_error": "drop", "reward.workers": 2}, ""),
        (
            "distill",
            {"functions": ["task"], "reward.answer": "number"},
            r"^`reward.answer` is set, but the flow `distill` has no role `reward` \(`evaluation.functions` have its",
        ),
        ("distill", {"reward.on_error": "drop"}, r"^`reward` is set, but the flow `distill` has no role `reward`"),
        ("distill", {"functions": ["f.py:f"], "answer": "number"}, r"^`evaluation.answer` is set, but neither `task`"),
        ("distill", {"pass_at": [1]}, r"^`evaluation.pass_at` is set, but the flow `distill` has no reward, and"),
        ("distill", {"functions": ["task"], "pass_at": [1]}, ""),
        ("sft", {"functions": ["task"]}, r"^`evaluation.functions` is set, .* generates nothing; remove it"),
        ("dpo", {"temperature": 0.5}, r"^`evaluation.temperature` is set, .* generates nothing; remove it"),
    ],
)
def test_what_measures_answers(algorithm: str, keys: dict[str, Any], said: str) -> None:
    recipe = recipe_of(algorithm, **keys)
    if said:
        with pytest.raises(ConfigError, match=said):
            checked_flow(recipe)
    else:
        checked_flow(recipe)


def test_keys_that_measure_nothing_are_let_be() -> None:
    """Where a run has begun with them, and beside stages, of which another may generate."""
    checked_flow(recipe_of("distill", functions=["f.py:f"], answer="number", pass_at=[1]).letting_be())
    checked_flow(recipe_of("sft", functions=["task"], answer="number", temperature=0.5).letting_be())

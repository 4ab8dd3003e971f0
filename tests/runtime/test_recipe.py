"""Recipes: what a user may write, and what a wrong key or value is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from plait.algorithms.grpo import GRPOOptions
from plait.errors import ConfigError
from plait.runtime.recipe import load_recipe, parse_overrides, validate_options

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
BASE = [("model", "m"), ("data.source", "d.jsonl")]


def test_later_values_win(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: m\nsteps: 5\ndata: {source: d.jsonl}\noptimizer: {learning_rate: 1.0e-5}\n")
    recipe = load_recipe(path, [("steps", 7), ("optimizer.warmup_steps", 2)])
    assert (recipe.steps, recipe.optimizer.learning_rate, recipe.optimizer.warmup_steps) == (7, 1e-5, 2)


def test_overrides_read_as_yaml() -> None:
    tokens = ["--steps", "3", "--sampling.stop=[a, b]", "--data.system-prompt", "Be brief."]
    assert parse_overrides(tokens) == [("steps", 3), ("sampling.stop", ["a", "b"]), ("data.system_prompt", "Be brief.")]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [("optimizer.learnig_rate", 1)],
            "unknown key `optimizer.learnig_rate`; did you mean `optimizer.learning_rate`?",
        ),
        ([("learning_rate", 1)], "did you mean `optimizer.learning_rate`?"),
        ([("temperature", 1)], "did you mean `sampling.temperature`?"),
        ([("steps", "many")], "key `steps`: input should be a valid integer.*found 'many'"),
        ([("steps", 0)], "key `steps`: input should be greater than or equal to 1, found 0"),
        ([("sampling", 3)], "`sampling` is a section of keys, found 3"),
    ],
)
def test_wrong_keys_are_named(overrides: list[tuple[str, object]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, BASE + overrides)


def test_missing_key_and_missing_file() -> None:
    with pytest.raises(ConfigError, match="key `model` is missing"):
        load_recipe(None, [("data.source", "d")])
    with pytest.raises(ConfigError, match=r"recipe `nowhere\.yaml` does not exist"):
        load_recipe(Path("nowhere.yaml"))


@pytest.mark.parametrize("text", ["model: [", "- a\n- b\n"])
def test_malformed_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.yaml"):
        load_recipe(path)


@pytest.mark.parametrize("tokens", [["steps", "3"], ["--steps"]])
def test_malformed_options(tokens: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_overrides(tokens)


def test_algorithm_options_are_checked_against_their_class() -> None:
    assert validate_options(GRPOOptions, {"clip_high": 0.28}).clip_high == 0.28
    with pytest.raises(ConfigError, match=r"unknown key `options\.clip_hihg`; did you mean `clip_high`"):
        validate_options(GRPOOptions, {"clip_hihg": 0.28})
    with pytest.raises(ConfigError, match=r"key `options\.kl_estimator`"):
        validate_options(GRPOOptions, {"kl_estimator": "k9"})

    class Own(BaseModel):
        depth: int

    with pytest.raises(ConfigError, match=r"options\.depth` is missing"):
        validate_options(Own, {})


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_short_and_valid(path: Path) -> None:
    import yaml

    def leaves(tree: object) -> int:
        return sum(map(leaves, tree.values())) if isinstance(tree, dict) else 1

    tree = yaml.safe_load(path.read_text())
    tree.get("data", {}).pop("parameters", None)  # the task's keys, not ours
    assert leaves(tree) <= 20
    load_recipe(path)

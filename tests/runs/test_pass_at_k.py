"""Evaluation by several answers to each held-out prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.rewards.statistics import pass_at_k
from plait.runtime.api import run

MakeRecipe = Callable[..., Recipe]
KEYS = {
    "evaluation.items": 3,
    "evaluation.temperature": 1.0,
    "evaluation.samples_per_prompt": 4,
    "evaluation.pass_at": [1, 2, 4],
}
EVEN = """
def count_sevens(completions, **columns):
    return [float(len(text) % 2 == 0) for text in completions]
"""


def test_pass_at_k_of_a_run(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Right is an answer with an even number of letters; what is read back says the same."""
    (tmp_path / "reward.py").write_text(EVEN)
    recipe = make_recipe(steps=1, dtype="float64", **KEYS)
    outcome = run(recipe)
    assert outcome.after is not None
    assert (outcome.after.num_items, len(outcome.after.samples)) == (3, 12)
    samples = read_rows(recipe.run_dir / "samples" / "eval-000001.jsonl")
    assert [row["uid"].split(".")[1] for row in samples] == ["0", "1", "2", "3"] * 3
    right = [sum(row["reward"] >= 1 for row in samples[at : at + 4]) for at in (0, 4, 8)]
    assert 0 < sum(right) < 12
    assert len({row["response"] for row in samples[:4]}) > 1, "answers to a prompt differ"
    metrics = outcome.after.metrics()
    for k in (1, 2, 4):
        assert metrics[f"eval/pass@{k}"] == pytest.approx(sum(pass_at_k(4, c, k) for c in right) / 3)
        assert metrics[f"eval/pass@{k}_low"] < metrics[f"eval/pass@{k}"] < metrics[f"eval/pass@{k}_high"] + 1e-12
    assert metrics["eval/reward"] == pytest.approx(metrics["eval/pass@1"])
    row = read_rows(recipe.run_dir / "evaluations.jsonl")[-1]
    assert {name: value for name, value in row.items() if name != "step"} == metrics
    again = run(recipe, resume=True)  # nothing is left to do: the evaluations are read back
    assert again.after is not None
    assert again.after.metrics() == metrics
    assert again.after[""].per_item == 4


RANKS = """
def count_sevens(completions, log_metric, log_extra, **columns):
    log_metric("asked_about", len(completions))
    log_extra("of", [text[:1] for text in completions])
    return [float(sum(len(other) < len(text) for other in completions)) for text in completions]
"""


def test_functions_get_all_answers_to_a_prompt_together(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A function that compares samples says of an evaluation's what it says of a training step's."""
    (tmp_path / "reward.py").write_text(RANKS)
    outcome = run(make_recipe(steps=1, dtype="float64", **KEYS))
    assert outcome.after is not None
    samples = read_rows(tmp_path / "run" / "samples" / "eval-000001.jsonl")
    for at in (0, 4, 8):
        lengths = [len(row["response"]) for row in samples[at : at + 4]]
        assert [row["reward"] for row in samples[at : at + 4]] == [
            sum(other < length for other in lengths) for length in lengths
        ]
    assert any(row["reward"] for row in samples)
    assert all(row["of"] == row["response"][:1] for row in samples)
    assert outcome.after.metrics()["eval/asked_about"] == 4


@pytest.mark.slow
def test_pass_at_k_on_two_devices(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(EVEN)
    recipe = make_recipe(steps=1, dtype="float64", **KEYS)
    outcome = run(recipe)
    assert outcome.after is not None
    two = run(recipe.model_copy(update={"plan": "colocated", "devices": 2, "run_dir": tmp_path / "two"}))
    assert two.after is not None
    assert [sample.token_ids for sample in two.after.samples] == [s.token_ids for s in outcome.after.samples]
    assert two.after.metrics() == outcome.after.metrics()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"evaluation.temperature": 0.0}, "at temperature 0 all answers to a prompt are the same"),
        ({"evaluation.pass_at": [8]}, "pass_at has 8, but each prompt is answered 4 times"),
        ({"evaluation.pass_at": [0]}, r"evaluation\.pass_at\.0.*greater than or equal to 1"),
    ],
)
def test_what_cannot_be_told_is_refused(make_recipe: MakeRecipe, keys: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_recipe(**(KEYS | keys))

"""The length of a run as passes over its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait.cli import main
from plait.errors import ConfigError
from plait.observe.run_log import read_rows
from plait.recipes.keys import parse_overrides
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.recipes.stages import load_stages
from plait.runtime.api import run
from plait.runtime.folder.stored_recipe import changed_keys
from tests.runs.plans import assert_equal_runs

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def by_epochs(make_recipe: MakeRecipe) -> Callable[..., Recipe]:
    """`by_epochs(1.5)`: a recipe over 12 prompts, 3 a step."""

    def make(epochs: float, **keys: Any) -> Recipe:
        tree = make_recipe(**keys).model_dump(mode="json")
        del tree["steps"]
        return Recipe.model_validate(tree | {"epochs": epochs})

    return make


@pytest.mark.parametrize(
    ("epochs", "rows", "per_step", "steps"),
    [
        (1, 12, 3, 4),
        (2.5, 12, 3, 10),
        (1, 10, 4, 3),  # 2.5 batches: the third begins the next pass
        (2, 10, 4, 5),
        (0.1, 30, 3, 1),  # one batch to the row, which 0.1 · 30 / 3 in floating point is not
        (0.01, 12, 3, 1),
    ],
)
def test_epochs_come_to_steps(epochs: float, rows: int, per_step: int, steps: int) -> None:
    recipe = Recipe(model="m", data={"source": "s"}, epochs=epochs, prompts_per_step=per_step)  # type: ignore[arg-type]
    assert recipe.steps_of(rows) == steps
    assert recipe.model_copy(update={"epochs": None, "steps": 7}).steps_of(rows) == 7


def test_steps_and_epochs_exclude_each_other(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    tree: dict[str, Any] = {"model": "m", "data": {"source": "s"}, "steps": 5}
    path.write_text(yaml.safe_dump(tree))
    told = load_recipe(path, parse_overrides(["--epochs", "2"]))  # what is typed wins over the file
    assert (told.epochs, told.steps_of(32), told.steps) == (2, 4, 100)
    assert load_recipe(path, parse_overrides(["--epochs", "null"])).steps == 5
    both = r"^`steps` \(5\) and `epochs` \(2\) are both set; give one of them$"
    with pytest.raises(ConfigError, match=both):
        load_recipe(path, parse_overrides(["--epochs", "2", "--steps", "5"]))
    path.write_text(yaml.safe_dump(tree | {"epochs": 2}))
    with pytest.raises(ConfigError, match=both):
        load_recipe(path)
    stages = {"first": {}, "second": {"epochs": 3}}
    path.write_text(yaml.safe_dump(tree | {"stages": stages}))
    assert [(one.steps, one.epochs) for one in load_stages(path).recipes.values()] == [(5, None), (100, 3)]


def test_a_run_of_epochs_is_one_of_so_many_steps(by_epochs: MakeRecipe, make_recipe: MakeRecipe, tmp_path: Path):
    """1.5 passes over 12 prompts, 3 a step and 2 optimizer steps each: 12 of these, the warm-up a quarter of them."""
    keys = {"optimizer.schedule": "linear", "options": {"kl_coef": 0.05, "mini_batches": 2}}
    found = run(by_epochs(1.5, **{"optimizer.warmup_ratio": 0.25}, **keys, run_dir=str(tmp_path / "epochs")))
    expected = run(make_recipe(steps=6, **{"optimizer.warmup_steps": 3}, **keys, run_dir=str(tmp_path / "steps")))
    assert (found.finished, found.step, found.steps) == (expected.finished, expected.step, expected.steps)
    assert_equal_runs(tmp_path / "epochs", tmp_path / "steps", tolerance=0)
    rates = [row["actor/lr"] for row in read_rows(tmp_path / "epochs" / "metrics.jsonl")]
    # After steps 2, 4, … of the optimizer: 2/3, then 1 − x with x = (step − 3) / 9 of the last one.
    assert rates == pytest.approx([1e-3 * share for share in (2 / 3, 1, 7 / 9, 5 / 9, 3 / 9, 1 / 9)])
    stored = yaml.safe_load((tmp_path / "epochs" / "recipe.yaml").read_text())
    assert (stored["steps"], stored["epochs"]) == (6, None)


def test_a_run_goes_on_to_further_epochs(by_epochs: MakeRecipe, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    assert run(by_epochs(0.5, run_dir=str(tmp_path / "epochs"))).step == 2
    assert run(by_epochs(1.25, run_dir=str(tmp_path / "epochs")), resume=True).step == 5
    run(make_recipe(steps=5, run_dir=str(tmp_path / "steps")))
    assert read_rows(tmp_path / "epochs" / "metrics.jsonl")[-1]["training/epoch"] == 1.25
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("epochs", "steps")]
    assert weights[0] == weights[1]


def test_a_dry_run_says_what_epochs_come_to(
    by_epochs: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = by_epochs(1.5).model_dump(mode="json", exclude={"steps"})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "run of 6 steps" in shown
    assert "12 training prompts (1.50 epochs)" in shown


def test_a_key_that_is_new_since_a_run_was_begun_has_its_default(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(**{"data.more": [{"source": "other.jsonl"}]})
    stored = recipe.model_dump(mode="json")
    for section in (stored["optimizer"], stored["critic"]["optimizer"]):
        del section["warmup_ratio"], section["min_lr_ratio"], section["power"]
    del stored["epochs"], stored["evaluation"]["pass_at"], stored["data"]["more"][0]["shuffle"]
    path = tmp_path / "stored.yaml"
    path.write_text(yaml.safe_dump(stored))
    assert changed_keys(path, recipe) == {}
    assert list(changed_keys(path, make_recipe(**{"optimizer.warmup_ratio": 0.1}))) == [
        "data.more",
        "optimizer.warmup_ratio",
    ]

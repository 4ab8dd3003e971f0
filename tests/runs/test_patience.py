"""Runs that end before their last step, as their evaluations get no better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.cli.dry_run import dry_run
from plait.cli.report import print_outcome
from plait.errors import ConfigError
from plait.observe.run_log import read_rows
from plait.output import marked
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.history import FINISHED, History
from plait.runtime.folder.progressed import last_step

MakeRecipe = Callable[..., Recipe]
TOLD = [0.0, 1.0, 3.0, 2.0, 3.0, 4.0, 1.0, 1.0, 1.0]
"""What the evaluations of a run say, that before the first step included."""
JUDGE = f"""
from pathlib import Path

def told(completions, **columns):
    calls = Path(__file__).with_name("calls")
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    return [{TOLD}[len(calls.read_text()) - 1]] * len(completions)
"""


@pytest.fixture
def make(make_recipe: MakeRecipe, tmp_path: Path) -> MakeRecipe:
    def recipe(name: str, **more: Any) -> Recipe:
        (folder := tmp_path / f"of_{name}").mkdir(exist_ok=True)
        (folder / "judge.py").write_text(JUDGE)
        keys: dict[str, Any] = {
            "evaluation.items": 1,
            "evaluation.every": 1,
            "evaluation.functions": [f"{folder}/judge.py:told"],
            "evaluation.best_by": "eval/told",
            "evaluation.patience": 2,
            "run_dir": str(tmp_path / name),
            "steps": 8,
        }
        return make_recipe(**{**keys, **more})

    return recipe


def test_a_run_ends_when_it_gets_no_better(make: MakeRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    """After step 2 is the best; step 4 is as good, which is no better. It ends as one that has done all steps."""
    recipe = make("one")
    outcome = run(recipe)
    assert (outcome.finished, outcome.step, outcome.steps) == (True, 4, 8)
    assert outcome.after is not None
    assert outcome.after.metrics()["eval/told"] == 3.0
    said = (
        "the run ends after step 4: the last 2 evaluations were no better, `eval/told` was 3 after step 2 "
        "(`evaluation.patience`; with more of it, or 0, a resumed run goes on)"
    )
    assert outcome.ended_early == said
    capsys.readouterr()
    print_outcome(recipe, outcome)
    assert said in " ".join(capsys.readouterr().out.split())
    assert [row["step"] for row in read_rows(recipe.run_dir / "metrics.jsonl")] == [1, 2, 3, 4]
    assert (marked(recipe.run_dir / "best")["step"], marked(recipe.run_dir / "final")["step"]) == (2, 4)
    assert History(recipe.run_dir, resume=True).stays[-1]["how"] == FINISHED
    assert last_step(recipe.run_dir, recipe.evaluation, recipe.steps) == 4

    longer = make("one", steps=9)
    for again in (recipe, longer):  # more steps are no more patience
        outcome = run(again, resume=True)
        assert (outcome.finished, outcome.step, outcome.ended_early) == (True, 4, said)
    steered = {"optimizer.learning_rate": 0.5}
    for tried in (dry_run, run):
        with pytest.raises(ConfigError, match=r"has done all of its steps.*`evaluation.patience`"):
            tried(make("one", **steered), resume=True)
    assert dry_run(make("one", **steered, **{"evaluation.patience": 3}), resume=True) == 0
    outcome = run(make("one", steps=5, **{"evaluation.patience": 3}), resume=True)
    assert (outcome.finished, outcome.step, outcome.ended_early) == (True, 5, "")
    assert marked(recipe.run_dir / "best")["step"] == 5


def test_a_run_that_was_stopped_between_ends_where_one_that_was_not_does(make: MakeRecipe) -> None:
    run(make("two", steps=3))
    outcome = run(make("two"), resume=True)
    assert (outcome.finished, outcome.step) == (True, 4)

"""Samples of several turns that are generated ahead of their step, and go on with new weights between their tokens and
between turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.runs.placed_runs import GRPO, PPO, where
from tests.runs.plans import assert_equal_runs
from tests.runs.test_partial_rollout import APART, FEW, LEADS, PARTS, RING, check, replayed, versions_of
from tests.runs.test_resume import kill_and_resume, kill_in_step, result_of
from tests.runs.test_staleness import versions
from tests.runs.test_turns import keys_of
from tests.runs.written import logged, samples_by_step

MakeRecipe = Callable[..., Recipe]
Placed = Callable[..., Recipe]
STEPS = 5


def ahead(folder: Path, partial_rollout: str, function: str = "reply", **keys: Any) -> dict[str, Any]:
    """Keys of a run: with `off` all samples of a batch are drawn at once, otherwise few, and what is computed together
    is for the clock to say."""
    places = {} if partial_rollout == "off" else FEW | {"sampling.exact": True}
    places = places | {"sampling.max_response_tokens": 60, "partial_rollout": partial_rollout}
    return keys_of(folder, function, **(places | keys))


@pytest.mark.parametrize("partial_rollout", slow_but(["keep"], ["keep", "recompute"]))
def test_samples_go_on_within_turns_and_between_them(
    make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str
) -> None:
    recipe = make_recipe(**ahead(tmp_path, partial_rollout, steps=STEPS, max_staleness=2))
    assert run(recipe).finished
    check(recipe.run_dir, 2)
    stood = [tokens for row in read_rows(recipe.run_dir / "moments.jsonl") for _, s in row["open"] for _, tokens in s]
    assert any(stood)
    samples = [sample for step in samples_by_step(recipe.run_dir) for sample in step]
    conversed = [sample for sample in samples if "replies" in sample]
    between = sum(any(versions_of(s)[at - 1] != versions_of(s)[at] for at, _ in s["replies"]) for s in conversed)
    within = sum(len(set(versions_of(s)[: s["replies"][0][0]])) > 1 for s in conversed)
    assert between or within, "the clock says which of them"
    again = replayed(recipe, "again")
    assert result_of(again) == result_of(recipe.run_dir)
    assert (again / "moments.jsonl").read_text() == (recipe.run_dir / "moments.jsonl").read_text()


@pytest.mark.slow
def test_with_wait_nothing_depends_on_how_long_replies_take(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    folders = []
    for function in ("reply", "slow_reply"):
        keys = ahead(tmp_path, "off", function, steps=4, max_staleness=2, run_dir=str(tmp_path / function))
        run(recipe := make_recipe(**keys))
        assert versions(recipe.run_dir) == [{0}, {0}, {0}, {1}]
        folders.append(recipe.run_dir)
    assert result_of(folders[0]) == result_of(folders[1])


def test_killed_runs_resume_exactly(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """Checkpoints have replies of samples that were generated ahead, and rewards of these see them."""
    (tmp_path / "seen.py").write_text("def seen(turns, **columns):\n    return [float(len(str(t))) for t in turns]\n")
    keys = ahead(tmp_path, "off", steps=4, max_staleness=1, **{"reward.functions": [f"{tmp_path}/seen.py:seen"]})
    kill_and_resume(make_recipe, tmp_path, points=(1,), seed=4, **keys)
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert min(row["turns/mean"] for row in rows) > 1.3


@pytest.mark.parametrize("partial_rollout", slow_but(["keep"], ["keep", "recompute"]))
def test_a_killed_run_ends_as_its_record_says(make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str) -> None:
    keys = ahead(tmp_path, partial_rollout, "slow_reply", steps=STEPS, max_staleness=2, **{"checkpoint.every": 1})
    recipe = make_recipe(**keys)
    kill_in_step(recipe, 2)
    assert run(recipe, resume=True).finished
    check(recipe.run_dir, 2)
    assert result_of(replayed(recipe, "undisturbed")) == result_of(recipe.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("replies", ["x", "much longer than before"])
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
def test_a_run_whose_replies_are_others_goes_on_with_a_record_of_its_own(
    make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str, replies: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was killed, and its tool says something else than before, as a search does."""
    recipe = make_recipe(**ahead(tmp_path, partial_rollout, steps=STEPS, max_staleness=2, **{"checkpoint.every": 2}))
    kill_in_step(recipe, 3)
    tools = tmp_path / "tools.py"
    tools.write_text(tools.read_text().replace("characters", replies))
    assert run(recipe, resume=True).finished
    check(recipe.run_dir, 2)
    check(replayed(recipe, "again"), 2)  # its first steps were made with the other tool
    assert "unfinished samples are not where" in capsys.readouterr().err


PLANS: dict[str, tuple[tuple[str, dict[str, Any]], str | dict[str, str]]] = {
    "apart": (GRPO, APART),
    "leads": (GRPO, LEADS),
    "split": (PPO, "split 2"),
    "colocated": (GRPO, "colocated 2"),
    "two": (GRPO, {"actor.generate": "1,2 dp2", "actor.train": "0", "ref.logprobs": "1"}),
    "ring": (GRPO, RING),
    "parts": (GRPO, PARTS),
}


@pytest.mark.parametrize("name", slow_but(["apart"], PLANS))
def test_a_plan_changes_nothing(name: str, place: Path, placed: Placed, reference: Callable[..., Path]) -> None:
    (flow, keys), plan = PLANS[name]
    keys = ahead(place, "off", steps=3, max_staleness=1, **keys)
    slow = {"turns.reply": f"{place}/tools.py:slow_reply", "turns.workers": 2}
    recipe = placed(flow, f"turns-ahead-{name}", **(keys | slow), **where(place, f"turns-ahead-{name}", plan))
    assert run(recipe).finished
    assert logged(recipe)[0]["turns/mean"] > 1.5
    assert_equal_runs(recipe.run_dir, reference(flow, **keys))


@pytest.mark.slow
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
@pytest.mark.parametrize("name", PLANS)
def test_a_run_is_a_function_of_its_seed_and_its_record(
    name: str, partial_rollout: str, place: Path, placed: Placed
) -> None:
    """Whatever the clock did the first time: again along its record, and then by one process alone."""
    (flow, keys), plan = PLANS[name]
    keys = ahead(place, partial_rollout, "slow_reply", steps=STEPS, max_staleness=2, **keys, **{"checkpoint.every": 2})
    keys["sampling.exact"] = name != "parts"  # which is refused, as sums over ranks round
    name = f"turns-{name}-{partial_rollout}"
    recipe = placed(flow, name, **keys, **where(place, name, plan))
    assert run(recipe).finished
    check(recipe.run_dir, 2, len(samples_by_step(recipe.run_dir)[0]))
    assert max(row["turns/mean"] for row in logged(recipe)) > 1.5
    alone = placed(flow, name, **keys)
    assert_equal_runs(replayed(alone, f"alone-{name}"), recipe.run_dir)
    assert_equal_runs(replayed(recipe, f"again-{name}"), recipe.run_dir)

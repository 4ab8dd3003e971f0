"""Dynamic sampling with samples that go on with new weights: which prompts a further round has, and how far it was when
weights came, is on record, and with it every plan trains alike."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.moments import Round
from tests.cases import slow_but
from tests.runs.placed_runs import GRPO, where
from tests.runs.plans import assert_equal_runs
from tests.runs.test_partial_rollout import APART, FEW, LEADS, PARTS, RING, oldest, replayed
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.test_turns_ahead import ahead
from tests.runs.written import samples_by_step

MakeRecipe = Callable[..., Recipe]
Placed = Callable[..., Recipe]
STEPS = 5
DYNAMIC: dict[str, Any] = {"dynamic_sampling": True, "max_sampling_rounds": 3}
SOME = """
    import time


    def some(prompts, completions, **columns):
        time.sleep(WAIT_S)
        every_second = int(prompts[0].split()[2]) % 2 == 0
        return [0.0 if every_second else i + text.count("7") for i, text in enumerate(completions)]
"""
"""A reward by which groups of every second prompt are left out."""


def keys_of(folder: Path, wait_s: float = 0.0, **keys: Any) -> dict[str, Any]:
    """Keys of a run whose functions take so long with a group."""
    (folder / "some.py").write_text(textwrap.dedent(SOME).replace("WAIT_S", str(wait_s)))
    reward = {"reward.functions": [f"{folder}/some.py:some"], "data.chat_template": False}
    return FEW | reward | {"steps": STEPS, "options": DYNAMIC, "sampling.exact": True} | keys


def check(run_dir: Path, most: int) -> None:
    """Ages, each prompt in one batch, and what is said of rounds."""
    steps = samples_by_step(run_dir)
    for step, samples in enumerate(steps):
        assert all(0 <= step - oldest(sample) <= most for sample in samples)
    uids = [sample["uid"] for samples in steps for sample in samples]
    assert len(set(uids)) == len(uids)
    rows = read_rows(run_dir / "metrics.jsonl")
    assert len(rows) == STEPS
    for row, samples in zip(rows, steps, strict=True):
        assert len(samples) == 4 * row["dynamic/groups_drawn"]
        assert row["off_policy/dropped"] == 0
    assert max(row["dynamic/rounds"] for row in rows) > 1
    begun = [Round(*begun) for row in last_rows(run_dir) for begun in row.get("rounds", ())]
    drawn = Counter(one.batch for one in begun)
    assert [drawn[step] + 1 for step in range(STEPS)] == [row["dynamic/rounds"] for row in rows]
    groups = [3 + sum(one.num_prompts or 0 for one in begun if one.batch == step) for step in range(STEPS)]
    assert groups == [row["dynamic/groups_drawn"] for row in rows]
    assert {one.num_prompts for one in begun} - {3}, "a further round draws what is missing"


def last_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The last row of each version."""
    return list({row["version"]: row for row in read_rows(run_dir / "moments.jsonl")}.values())


@pytest.mark.parametrize(
    ("partial_rollout", "most", "wait_s"),
    slow_but([("keep", 1, 0.0)], [("keep", 1, 0.0), ("recompute", 2, 0.0), ("keep", 2, 0.1), ("recompute", 1, 0.1)]),
)
def test_later_batches_draw_again_before_their_step(
    make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str, most: int, wait_s: float
) -> None:
    """On one process, where functions are fast or let a batch wait for its next round."""
    recipe = make_recipe(**keys_of(tmp_path, wait_s, max_staleness=most, partial_rollout=partial_rollout))
    assert run(recipe).finished
    check(recipe.run_dir, most)
    rows = read_rows(recipe.run_dir / "metrics.jsonl")
    epochs = [row["training/epoch"] for row in rows]
    assert epochs == sorted(epochs)
    assert epochs[-1] == sum(row["dynamic/groups_drawn"] for row in rows) / 12
    again = replayed(recipe, "again")
    assert result_of(again) == result_of(recipe.run_dir)
    assert (again / "moments.jsonl").read_text() == (recipe.run_dir / "moments.jsonl").read_text()


PLANS: dict[str, str | dict[str, str]] = {
    "apart": APART,
    "leads": LEADS,
    "split": "split 2",
    "colocated": "colocated 2",
    "two": {"actor.generate": "1,2 dp2", "actor.train": "0", "ref.logprobs": "1"},
    "ring": RING,
    "parts": PARTS,
}


@pytest.mark.parametrize(
    ("name", "partial_rollout"),
    slow_but([("apart", "keep")], [(n, how) for how in ("keep", "recompute") for n in PLANS]),
)
def test_all_plans_train_alike_along_a_record(name: str, partial_rollout: str, place: Path, placed: Placed) -> None:
    keys = keys_of(place, 0.02, max_staleness=2, partial_rollout=partial_rollout, **{"checkpoint.every": 2})
    keys = GRPO[1] | keys | {"options": GRPO[1]["options"] | DYNAMIC, "sampling.exact": False}
    recipe = placed("grpo", f"again-{name}-{partial_rollout}", **keys, **where(place, f"again-{name}", PLANS[name]))
    assert run(recipe).finished
    check(recipe.run_dir, 2)
    alone = placed("grpo", f"again-{name}-{partial_rollout}", **keys)
    assert_equal_runs(replayed(alone, f"alone-{name}-{partial_rollout}"), recipe.run_dir)
    assert_equal_runs(replayed(recipe, f"twice-{name}-{partial_rollout}"), recipe.run_dir)


@pytest.mark.parametrize(
    ("partial_rollout", "step"), slow_but([("keep", 2)], [("keep", 2), ("recompute", 3), ("keep", 4)])
)
def test_a_killed_run_ends_as_its_record_says(
    make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str, step: int
) -> None:
    """A checkpoint has the rounds of batches that are not whole, and groups are judged again."""
    keys = {"max_staleness": 2, "partial_rollout": partial_rollout, "checkpoint.every": 1}
    recipe = make_recipe(**keys_of(tmp_path, 0.02, **keys))
    kill_in_step(recipe, step)
    assert run(recipe, resume=True).finished
    check(recipe.run_dir, 2)
    assert result_of(replayed(recipe, "undisturbed")) == result_of(recipe.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["1", "5"], ids=["other groups stay", "all stay"])
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
def test_functions_that_judge_otherwise_after_a_resume_begin_a_new_record(
    make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str, rest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(
        **keys_of(tmp_path, max_staleness=2, partial_rollout=partial_rollout) | {"checkpoint.every": 2}
    )
    kill_in_step(recipe, 3)
    some = tmp_path / "some.py"
    some.write_text(some.read_text().replace("% 2 == 0", f"% 2 == {rest}"))
    assert run(recipe, resume=True).finished
    uids = [sample["uid"] for samples in samples_by_step(recipe.run_dir) for sample in samples]
    assert len(set(uids)) == len(uids)
    assert "a reward function may have said something else" in capsys.readouterr().err


@pytest.mark.slow
def test_samples_of_several_turns_are_drawn_again(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    keys = ahead(tmp_path, "keep", "slow_reply", steps=STEPS, max_staleness=2, options=DYNAMIC)
    recipe = make_recipe(**keys)
    assert run(recipe).finished
    check(recipe.run_dir, 2)
    assert result_of(replayed(recipe, "again")) == result_of(recipe.run_dir)


def test_a_model_that_judges_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    keys = keys_of(tmp_path, max_staleness=1, partial_rollout="keep", **{"reward.model": "some/scorer"})
    with pytest.raises(
        ConfigError, match=r"draws again by what `reward\.model` says, .* or set `partial_rollout` to off"
    ):
        run(make_recipe(**keys))

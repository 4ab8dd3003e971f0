"""What a run's folder says of how it came to be, and what a resumed run says of where it goes on."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.cli import main
from plait.errors import ConfigError, DataError, PlaitError, RunError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.history import FINISHED, STOPPED, History, Origin, code_files
from plait.schedule.plan import Placement, Plan
from plait.schedule.timeline import Timeline
from tests.cases import examples
from tests.models.tiny import save_tiny
from tests.runs.test_breaking_off import MakeRecipe, steps_of, tree, write_reward


def history(recipe: Recipe) -> dict[str, Any]:
    return json.loads((recipe.run_dir / "run.json").read_text())


@pytest.fixture
def two_steps(make_recipe: MakeRecipe) -> Recipe:
    recipe = make_recipe(steps=2, **{"checkpoint.every": 1})
    run(recipe)
    return recipe


def test_a_stay_is_told_with_its_command_versions_and_code(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(steps=2, **{"checkpoint.every": 1, "evaluation.items": 2})
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(recipe.model_dump(mode="json")))
    assert main(["train", str(mine)]) == 0
    told = history(recipe)
    assert told["saved_step"] == 2
    (stay,) = told["stays"]
    assert (stay["how"], stay["from_step"], stay["to_step"], stay["folder"]) == ("finished", 0, 2, os.getcwd())
    started, ended = (datetime.datetime.fromisoformat(stay[key]) for key in ("started", "ended"))
    assert started <= ended
    assert {"python", "plait", "torch", "transformers", "numpy"} <= stay["versions"].keys()
    reward = tmp_path / "reward.py"
    assert {one["key"]: one["path"] for one in stay["code"]} == {"reward.functions": str(reward), "recipe": str(mine)}
    noted = stay["code"][0]
    assert noted["sha256"] == hashlib.sha256(reward.read_bytes()).hexdigest()
    assert (recipe.run_dir / noted["copy"]).read_text() == reward.read_text()
    summary = (recipe.run_dir / "summary.txt").read_text()
    assert summary.startswith("2 held-out items, greedy")
    assert f"model: {recipe.run_dir}/final" in summary


def test_code_and_versions_that_changed_are_said_and_both_are_kept(
    two_steps: Recipe, make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = make_recipe(steps=3, **{"checkpoint.every": 1})
    run(longer, resume=True)
    said = capsys.readouterr().err
    assert "is another than" not in said
    assert "another version" not in said
    write_reward(tmp_path, "pass")
    told = history(two_steps)
    told["stays"][-1]["versions"]["plait"] = "0.0.1"
    (two_steps.run_dir / "run.json").write_text(json.dumps(told))
    run(make_recipe(steps=4, **{"checkpoint.every": 1}), resume=True)
    said = capsys.readouterr().err
    assert f"`reward.functions`: {tmp_path}/reward.py is another than when" in said
    assert f"warning: plait (0.0.1 then, {plait.__version__} now): another version than when" in said
    stays = history(two_steps)["stays"]
    assert [(stay["from_step"], stay["to_step"]) for stay in stays] == [(0, 2), (2, 3), (3, 4)]
    copies = {stay["code"][0]["copy"] for stay in stays}
    assert len(copies) == 2
    assert all((two_steps.run_dir / copy).is_file() for copy in copies)


def test_data_and_models_that_changed_are_said(
    make_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = tmp_path / "model", tmp_path / "prompts.jsonl"
    shutil.copytree(tiny_folder, model)
    keys = {"model": str(model), "checkpoint.every": 1, "options": {}}
    run(make_recipe(steps=1, **keys))
    run(make_recipe(steps=2, **keys), resume=True)
    assert "is another than" not in capsys.readouterr().err
    data.write_text(data.read_text() + '{"prompt": "one more"}\n')
    save_tiny(model, seed=5)
    recipe = make_recipe(steps=3, **keys)
    run(recipe, resume=True)
    said = capsys.readouterr().err
    for key, path in (("data.source", data), ("model", model)):
        assert f"warning: `{key}`: {path} is another than when this run was last worked on" in said
    assert "both are in" not in said
    noted = {one["key"]: one for one in history(recipe)["stays"][-1]["inputs"]}
    assert noted["data.source"] == {
        "key": "data.source",
        "path": str(data),
        "sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
    }


def test_an_input_is_another_where_its_link_was_turned_and_unknown_where_it_cannot_be_read(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text(name)
    link, folder = tmp_path / "latest.jsonl", tmp_path / "run"
    folder.mkdir()
    recipe = make_recipe(**{"data.source": str(link)})
    said = []
    for target in ("one.jsonl", "two.jsonl", "/proc/self/mem", "two.jsonl"):  # the third fails when it is read
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        said.append(History(folder, resume=True).begin(Origin.here(), recipe, Plan("p", 1), 0, print))
    assert [len(lines) for lines in said] == [0, 1, 0, 0]
    assert "`data.source`" in said[1][0]
    assert "two.jsonl is another than" in said[1][0]


def test_steps_of_another_plan_or_machine_are_not_comparable(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """By hand: what a stay that begins after a step can be compared from."""
    folder, recipe = tmp_path / "run", make_recipe()
    folder.mkdir()
    one, named = Plan("one", 1), Plan("the same", 1, predicted=Timeline(()))
    other = Plan("one", 1, (Placement("actor.train", "train", (0,)),))

    def comparable_from(plan: Plan, step: int) -> int:
        History(folder, resume=True).begin(Origin.here(), recipe, plan, step, print)
        return History(folder, resume=True).comparable_from

    def rewrite(change: Callable[[dict[str, Any]], object]) -> None:
        """Change what the newest stay says."""
        told = history(recipe)
        change(told["stays"][-1])
        (folder / "run.json").write_text(json.dumps(told))

    assert [comparable_from(one, 0), comparable_from(named, 2)] == [0, 0]
    assert [comparable_from(other, 4), comparable_from(other, 6), comparable_from(other, 3)] == [4, 4, 3]
    assert comparable_from(one, 8) == 8, "though it was the plan before"
    rewrite(lambda stay: stay["machine"].update(cores=stay["machine"]["cores"] + 1))
    assert comparable_from(one, 9) == 9
    rewrite(lambda stay: stay.pop("plan"))
    assert comparable_from(one, 10) == 10, "as older versions wrote it"
    assert comparable_from(one, 11) == 10


def test_steps_of_a_stay_that_came_to_its_end_are_counted_once(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """By hand: the stays whose steps no profile has yet, by how the ones before the newest ended."""
    folder, recipe, plan = tmp_path / "run", make_recipe(), Plan("one", 1)
    folder.mkdir()
    found = []
    for step, how in ((0, "RunError: planted"), (2, None), (4, STOPPED), (6, "KeyboardInterrupt: "), (7, FINISHED)):
        stay = History(folder, resume=True)
        stay.begin(Origin.here(), recipe, plan, step, print)
        found.append(History(folder, resume=True).uncounted)
        if how is not None:  # else it was killed
            stay.end(how, step)
    History(folder, resume=True).begin(Origin.here(), recipe, plan, 9, print)
    found.append(History(folder, resume=True).uncounted)
    assert found == [[0], [0, 2], [0, 2, 4], [6], [6, 7], [9]]
    History(folder, resume=True).begin(Origin.here(), recipe, Plan("other", 2), 9, print)
    assert History(folder, resume=True).uncounted == [9]


def test_a_failed_stay_says_how_it_ended(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    write_reward(tmp_path, "raise ValueError('planted')")
    recipe = make_recipe()
    with pytest.raises(RunError):
        run(recipe)
    (stay,) = history(recipe)["stays"]
    assert stay["how"].startswith("RunError: ")
    assert "planted" in stay["how"]
    assert (history(recipe)["saved_step"], stay["to_step"]) == (0, 0)


def test_modules_are_found_without_importing_them(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "judge.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = make_recipe(**{"reward.functions": ["some_package.judge:good", "task"], "algorithm": "no.such:flow"})
    assert code_files(recipe, Origin(("plait",), "/")) == {"reward.functions": package / "judge.py"}


def test_a_resumed_run_says_from_where(
    two_steps: Recipe, make_recipe: MakeRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"checkpoint.every": 1}
    capsys.readouterr()
    run(make_recipe(steps=3, **keys), resume=True)
    said = capsys.readouterr().err
    assert f"resuming after step 2 of 3, from {two_steps.run_dir}/checkpoints/step-2\n" in said
    newest = two_steps.run_dir / "checkpoints" / "step-3"
    (newest / "state.json").write_bytes(b"\0" * 20)
    run(make_recipe(steps=3, **keys), resume=True)
    said = capsys.readouterr().err
    assert "resuming after step 2 of 3, from " in said
    assert "the checkpoint of step 3 cannot be used: damaged, and its steps are done again" in said
    shutil.rmtree(newest)
    run(make_recipe(steps=3, **keys), resume=True)
    assert "the checkpoint of step 3 is gone, and the steps up to it are done again" in capsys.readouterr().err
    assert steps_of(two_steps) == [1, 2, 3]


def test_logs_are_not_discarded_where_the_checkpoints_are_gone(two_steps: Recipe, make_recipe: MakeRecipe) -> None:
    checkpoints = two_steps.run_dir / "checkpoints"
    checkpoints.rename(two_steps.run_dir / "moved")
    before = tree(two_steps.run_dir)
    with pytest.raises(ConfigError, match=r"has no checkpoint, though one of step 2 was written.*Put the folder"):
        run(make_recipe(steps=3), resume=True)
    assert tree(two_steps.run_dir) == before
    (two_steps.run_dir / "moved").rename(checkpoints)
    assert run(make_recipe(steps=3), resume=True).step == 3


def test_a_run_that_saved_nothing_begins_again_and_says_so(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reward(tmp_path, "raise ValueError('planted')")
    recipe = make_recipe(steps=1)
    with pytest.raises(RunError):
        run(recipe)
    write_reward(tmp_path, "pass")
    assert run(recipe, resume=True).finished
    assert "no step is saved yet: the run begins again at step 1" in capsys.readouterr().err


DEEP = b"[" * 100_000
DAMAGE = {
    "no JSON": b"{nonsense}\n",
    "a list": b"[1, 2]\n",
    "no step": b'{"eval/reward": 1.0}\n',
    "a step of text": b'{"step": "one"}\n',
    "deep": DEEP + b"\n",
    "NUL": b"\0" * 64 + b"\n",
    "no UTF-8": b'{"step": 1, "a": "\xff"}\n',
}


DAMAGED = {
    "metrics.jsonl": tuple(DAMAGE),
    "evaluations.jsonl": ("a list", "a step of text", "NUL"),  # as metrics are read
    "doctor.jsonl": ("no JSON", "no step", "no UTF-8"),  # so too
    "run.json": ("no JSON", "a list", "deep", "NUL", "no UTF-8"),
    "trace.json": ("no JSON", "a list", "deep", "NUL", "no UTF-8"),
}


def test_a_damaged_file_of_a_run_is_one_message(two_steps: Recipe, make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(steps=3, **{"checkpoint.every": 1})
    for name, all_damages in DAMAGED.items():
        damages = all_damages if name == "metrics.jsonl" else all_damages[: examples(1, len(all_damages))]
        path = two_steps.run_dir / name
        sound = path.read_bytes()
        kept = len(sound)
        for damage in damages:
            damaged = DAMAGE[damage] + b" " * max(0, kept - len(DAMAGE[damage]) - 1) + b"\n"
            if name in ("metrics.jsonl", "trace.json"):  # cut back to as many bytes as they had
                damaged = damaged[: kept - 1] + b"\n"
            path.write_bytes(damaged)
            with pytest.raises(PlaitError) as caught:
                run(recipe, resume=True)
            assert name in str(caught.value), damage
        path.write_bytes(sound)
    assert run(recipe, resume=True).step == 3, "what was said harmed nothing"


ONE_STAY = '{"format": "plait-run", "version": 1, "stays": [%s], "saved_step": 1}'


@pytest.mark.parametrize("content", ["", "[]", ONE_STAY % "{}", ONE_STAY % '{"code": []}'])
def test_a_damaged_history_is_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DataError, match=r"run\.json"):
        History(tmp_path, resume=True)


def test_rows_are_read_with_the_line_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": }\n{"torn')
    with pytest.raises(DataError, match=r"log\.jsonl:2 is damaged: "):
        read_rows(tmp_path / "log.jsonl")

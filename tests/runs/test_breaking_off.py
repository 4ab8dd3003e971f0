"""However a run is refused, fails or is broken off: nothing that was good is lost, and it says where to go on."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from plait.cli import main
from plait.cli.dry_run import dry_run
from plait.cli.report import ended_with
from plait.cost.estimate import model_shape
from plait.errors import RESUME, ConfigError, ModelError, PlaitError, RunError
from plait.generation.engine import Engine
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime import api
from plait.runtime.api import run
from plait.runtime.evaluating import generate
from plait.runtime.folder.ending import said_of_end
from plait.runtime.processes import generating, measured
from plait.runtime.session import Session
from tests.cases import slow_but

MakeRecipe = Callable[..., Recipe]

REWARD = """
import os, pathlib, signal
here = pathlib.Path(__file__).parent
def count_sevens(prompts, completions, **columns):
    evaluates = len(completions) == 1  # a step's groups have four
    {body}
    return [float(text.count("7")) for text in completions]
def needy(completions, difficulty, **columns):
    return [0.0 for _ in completions]
"""


def write_reward(folder: Path, body: str) -> None:
    (folder / "reward.py").write_text(REWARD.replace("{body}", body))


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "run.lock"
    }


def steps_of(recipe: Recipe, log: str = "metrics") -> list[int]:
    return [row["step"] for row in read_rows(recipe.run_dir / f"{log}.jsonl")]


def checkpoints_of(recipe: Recipe) -> set[str]:
    folder = recipe.run_dir / "checkpoints"
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


# -- refused


def wrong_inputs(tmp_path: Path) -> list[tuple[dict[str, Any], type[PlaitError], str]]:
    torn = tmp_path / "torn"
    return [
        ({"reward.functions": [f"{tmp_path}/reward.py:absent"]}, ConfigError, "absent"),
        ({"reward.functions": [f"{tmp_path}/reward.py:needy"]}, ConfigError, "needs `difficulty`"),
        ({"model": str(torn)}, ModelError, "torn"),
    ]


@pytest.mark.parametrize("which", slow_but([0, 2], [0, 1, 2]))
def test_wrong_input_leaves_the_old_run_and_the_folder_as_they_were(
    make_recipe: MakeRecipe, tmp_path: Path, tiny_folder: Path, which: int
) -> None:
    write_reward(tmp_path, "print('scored')")
    (tmp_path / "torn").mkdir()
    for path in tiny_folder.iterdir():
        (tmp_path / "torn" / path.name).write_bytes(path.read_bytes()[: 1000 if "safetensors" in path.name else None])
    keys, kind, message = wrong_inputs(tmp_path)[which]

    with pytest.raises(kind, match=message):
        run(make_recipe(steps=1, **keys))
    assert not (tmp_path / "run").exists(), "nothing stays behind"
    run(make_recipe(steps=1))
    before = tree(tmp_path / "run")
    assert b"scored" in before["rewards.log"]

    with pytest.raises(kind, match=message):
        run(make_recipe(steps=1, overwrite=True, **keys))
    assert tree(tmp_path / "run") == before
    run(make_recipe(steps=2, overwrite=True))
    assert (tmp_path / "run/rewards.log").read_text().count("scored") == 6, "the old run's output is gone"


def test_a_tracker_that_does_not_start_leaves_nothing(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But to a run that is resumed it is how that stay ended."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConfigError("key `trackers`: no login")

    def refused(recipe: Recipe, *, resume: bool = False) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("plait.runtime.records.Trackers", refuse)
            with pytest.raises(ConfigError, match="no login"):
                run(recipe, resume=resume)

    refused(make_recipe(steps=1))
    assert not (tmp_path / "run").exists()
    assert run(make_recipe(steps=1)).finished
    refused(make_recipe(steps=2), resume=True)
    assert said_of_end(tmp_path / "run") == "the run ended after step 1: key `trackers`: no login"


def test_a_folder_that_is_taken_is_refused_before_any_work(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(steps=1)
    run(recipe)
    monkeypatch.setattr(api, "prepare", lambda *_, **__: pytest.fail("data were drawn"))
    with pytest.raises(ConfigError, match="holds a run already"):
        run(recipe)
    with pytest.raises(ConfigError, match=r"begun with other values of `seed` \(0 then, 1 now\); give"):
        run(make_recipe(steps=1, seed=1), resume=True)


def test_a_dry_run_refuses_what_a_run_refuses_and_leaves_nothing(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reward(tmp_path, "pass")
    assert dry_run(make_recipe()) == 0
    assert "training prompts" in capsys.readouterr().out
    for keys, kind, message in wrong_inputs(tmp_path)[:2]:
        with pytest.raises(kind, match=message):
            dry_run(make_recipe(**keys))
    assert not (tmp_path / "run").exists()
    run(make_recipe(steps=1))
    before = tree(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run already"):
        dry_run(make_recipe())
    for keys, kind, message in wrong_inputs(tmp_path)[
        :2
    ]:  # what the run would be refused for in any folder comes first
        with pytest.raises(kind, match=message):
            dry_run(make_recipe(**keys))
    assert dry_run(make_recipe(steps=3), resume=True) == 0
    assert tree(tmp_path / "run") == before


# -- resumed


def test_what_may_change_on_resume(make_recipe: MakeRecipe) -> None:
    keys = {"evaluation.items": 3, "evaluation.every": 1, "checkpoint.every": 1}
    recipe = make_recipe(steps=2, **keys)
    run(recipe)
    for key, value in {"evaluation.items": 4, "data.prompt_template": "{question} now"}.items():
        with pytest.raises(ConfigError, match=f"other values of `{key}`"):
            run(make_recipe(steps=2, **keys | {key: value}), resume=True)
    with pytest.raises(ConfigError, match=r"`steps` is 1, but the run in .* has done 2"):
        run(make_recipe(steps=1, **keys), resume=True)
    assert "steps: 2" in (recipe.run_dir / "recipe.yaml").read_text()
    run(make_recipe(steps=3, **keys | {"evaluation.every": 3, "evaluation.show": 0}), resume=True)
    stored = (recipe.run_dir / "recipe.yaml").read_text()
    assert "steps: 3" in stored
    assert "every: 3" in stored
    assert steps_of(recipe, "evaluations") == [0, 1, 2, 3]


def test_a_resumed_run_has_the_pool_that_it_began_with(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is recorded where the recipe leaves it open, so another default later on changes no decision."""
    run(make_recipe(steps=1))
    recipe = make_recipe(steps=2)
    path = recipe.run_dir / "recipe.yaml"
    stored = yaml.safe_load(path.read_text())
    positions = model_shape(recipe.model).max_positions
    assert stored["sampling"]["kv_tokens"] == recipe.sampling.max_running * -(-positions // 16) * 16
    stored["sampling"]["kv_tokens"] = 1024
    path.write_text(yaml.safe_dump(stored))
    sizes = []
    begin = Engine.__init__

    def watched(engine: Engine, model: Any, settings: Any, **options: Any) -> None:
        begin(engine, model, settings, **options)
        sizes.append(engine.occupancy.kv_tokens[1])

    monkeypatch.setattr(Engine, "__init__", watched)
    run(recipe, resume=True)
    assert set(sizes) == {1024}
    assert yaml.safe_load(path.read_text())["sampling"]["kv_tokens"] == 1024
    with pytest.raises(ConfigError, match=r"other values of `sampling\.kv_tokens`"):
        run(make_recipe(steps=2, **{"sampling.kv_tokens": 2048}), resume=True)


def test_a_finished_run_is_not_done_again(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(**{"evaluation.items": 3})
    outcome = run(recipe)
    before = tree(recipe.run_dir)
    monkeypatch.setattr(Session, "evaluate", lambda *_, **__: pytest.fail("evaluated again"))
    again = run(recipe, resume=True)
    assert again.finished
    assert again.metrics == outcome.metrics
    for old, new in ((outcome.before, again.before), (outcome.after, again.after)):
        assert old is not None
        assert new is not None
        assert new.metrics() == old.metrics()
        assert new.samples == old.samples
    after = tree(recipe.run_dir)
    assert before.pop("run.json") != after.pop("run.json"), "it tells of each stay"
    assert after == before


# -- failed


def test_the_last_whole_step_is_saved_when_a_reward_fails(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    whole = make_recipe(steps=4, run_dir=str(tmp_path / "whole"))
    run(whole)
    recipe = make_recipe(steps=4)
    failing = "n = here / 'calls'; k = len(n.read_text()) if n.exists() else 0; n.write_text('x' * (k + 1))\n"
    write_reward(tmp_path, f"{failing}    if k >= 6 and (here / 'fail').exists(): raise ValueError('service away')")
    (tmp_path / "fail").touch()
    with pytest.raises(RunError, match=r"service away[\s\S]*checkpoint of step 2 is good.*--resume"):
        run(recipe)
    assert checkpoints_of(recipe) == {"step-2"}
    (tmp_path / "fail").unlink()
    assert run(recipe, resume=True).finished
    assert steps_of(recipe) == [1, 2, 3, 4]
    assert (recipe.run_dir / "final/model.safetensors").read_bytes() == (
        whole.run_dir / "final/model.safetensors"
    ).read_bytes()


def test_the_evaluation_before_the_first_step_outlives_a_failure_in_it(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_reward(tmp_path, "if (here / 'fail').exists(): raise ValueError('service away')")
    recipe = make_recipe(steps=1, **{"evaluation.items": 2})
    record = Session.record_evaluation
    with monkeypatch.context() as patch:
        patch.setattr(Session, "record_evaluation", lambda *a: (record(*a), (tmp_path / "fail").touch()))
        with pytest.raises(RunError, match=r"service away[\s\S]*no step is saved; --resume.* begins again at step 1"):
            run(recipe)
    (tmp_path / "fail").unlink()
    evaluated: list[int] = []
    evaluate = Session.evaluate
    monkeypatch.setattr(Session, "evaluate", lambda self, *a: (evaluated.append(self.done.step), evaluate(self, *a))[1])
    outcome = run(recipe, resume=True)
    assert evaluated == [1]
    assert outcome.before is not None
    assert steps_of(recipe, "evaluations") == [0, 1]


def fail_behind_the_first_evaluation(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_reward(tmp_path, "if (here / 'fail').exists(): raise ValueError('a mistake')")
    record = Session.record_evaluation
    with monkeypatch.context() as patch:
        patch.setattr(Session, "record_evaluation", lambda *a: (record(*a), (tmp_path / "fail").touch()))
        with pytest.raises(RunError, match=r"no step is saved; --resume.* begins again at step 1, also by other keys"):
            run(recipe)


def test_a_run_that_failed_before_it_saved_begins_again_by_other_keys(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer's loop: it fails, one key or one file is mended, the same command again."""
    wrong = make_recipe(steps=1, **{"evaluation.items": 2})
    fail_behind_the_first_evaluation(wrong, tmp_path, monkeypatch)
    assert steps_of(wrong, "evaluations") == [0]
    before = tree(wrong.run_dir)
    mended = make_recipe(steps=1, seed=1, **{"evaluation.items": 3})
    assert dry_run(mended, resume=True) == 0
    assert tree(wrong.run_dir) == before
    with pytest.raises(ModelError, match="absent"):
        run(make_recipe(steps=1, model=str(tmp_path / "absent")), resume=True)
    assert tree(wrong.run_dir) == before, "another run that is refused leaves it as it was"
    write_reward(tmp_path, "pass")
    capsys.readouterr()
    outcome = run(mended, resume=True)
    assert "keys have other values: the run begins anew" in capsys.readouterr().err
    assert outcome.before is not None
    assert outcome.before.num_items == 3, "what was measured by other keys is gone"
    assert steps_of(mended, "evaluations") == [0, 1]
    stays = json.loads((mended.run_dir / "run.json").read_text())["stays"]
    assert [stay["from_step"] for stay in stays] == [0]
    with pytest.raises(ConfigError, match=r"begun with other values of .*`seed` \(1 then, 0 now\)"):
        run(wrong, resume=True)


def test_what_was_measured_with_files_that_were_mended_is_measured_again(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(steps=1, **{"evaluation.items": 2})
    fail_behind_the_first_evaluation(recipe, tmp_path, monkeypatch)
    write_reward(tmp_path, "return [1.0 for _ in completions]")
    outcome = run(recipe, resume=True)
    assert "the evaluation before the first step is done again" in capsys.readouterr().err
    assert outcome.before is not None
    assert outcome.before.metrics()["eval/reward"] == 1.0
    assert [row["eval/reward"] for row in read_rows(recipe.run_dir / "evaluations.jsonl")] == [1.0, 1.0]


def test_the_advice_of_a_failed_reward_can_be_followed(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`reward.on_error: drop` is what its message names: the run goes on by it from the next step on."""
    counting = "n = here / 'calls'; k = len(n.read_text()) if n.exists() else 0; n.write_text('x' * (k + 1))\n"
    odd = "import re; odd = any(int(re.search(r'[0-9]+', str(p))[0]) % 2 for p in prompts)"
    write_reward(tmp_path, f"{counting}    {odd}\n    if k >= 3 and odd: raise ValueError('odd')")
    recipe = make_recipe(steps=2, **{"checkpoint.every": 1})
    with pytest.raises(RunError, match=r"`reward\.on_error: drop` leaves such samples out[\s\S]*checkpoint of step 1"):
        run(recipe)
    dropping = make_recipe(steps=2, **{"checkpoint.every": 1, "reward.on_error": "drop"})
    assert run(dropping, resume=True).finished
    assert "from step 2 on, `reward.on_error` is 'drop'; it was 'stop'" in capsys.readouterr().err
    stays = json.loads((recipe.run_dir / "run.json").read_text())["stays"]
    assert [stay["steering"]["reward.on_error"] for stay in stays] == ["stop", "drop"]
    assert steps_of(recipe) == [1, 2]


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "how", ["shutil.move(run, here / 'moved')", pytest.param("shutil.rmtree(run)", marks=pytest.mark.slow)]
)
def test_a_run_whose_folder_is_moved_or_removed_stops_and_makes_no_other(
    make_recipe: MakeRecipe, tmp_path: Path, how: str, devices: int
) -> None:
    """Else its later steps would lie in a second folder, of which the next run knows nothing."""
    counting = "n = here / 'calls'; k = len(n.read_text()) if n.exists() else 0; n.write_text('x' * (k + 1))\n"
    write_reward(tmp_path, f"{counting}    import shutil; run = here / 'run'\n    if k == 4: {how}")
    recipe = make_recipe(steps=4, devices=devices, **{"checkpoint.every": 1})
    with pytest.raises(
        RunError, match=f"{recipe.run_dir} is no longer the folder of this run: it was moved or removed"
    ):
        run(recipe)
    assert not recipe.run_dir.exists()
    if (moved := tmp_path / "moved").exists():
        moved.rename(recipe.run_dir)
        assert run(recipe, resume=True).finished
        assert steps_of(recipe) == [1, 2, 3, 4]


def test_no_step_is_saved_from_within_training(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(
        "import pathlib\n"
        "calls = []\n"
        "def loss(batch):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 2: raise ValueError('my loss')\n"
        "    return -batch.logprobs.sum()\n"
        "def flow(prompts, actor, reward):\n"
        "    samples = actor.generate(prompts)\n"
        "    scores = reward.score(samples)\n"
        "    actor.train(samples, loss=loss, mini_batches=2)\n"
    )
    recipe = make_recipe(algorithm=f"{tmp_path}/flow.py:flow", options={}, steps=3)
    with pytest.raises(Exception, match="my loss"):
        run(recipe)
    assert checkpoints_of(recipe) == set(), "the weights were neither those before the step nor those after it"


def test_an_evaluation_that_fails_loses_no_step(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """In the last evaluation, which comes after the save, and in a due one, after which its step is saved."""
    write_reward(tmp_path, "if evaluates and (here / 'fail').exists(): raise ValueError('judge away')")
    last = make_recipe(steps=2, **{"evaluation.items": 2}, run_dir=str(tmp_path / "last"))
    due = make_recipe(steps=2, **{"evaluation.items": 2, "evaluation.every": 1}, run_dir=str(tmp_path / "due"))
    for recipe, step in ((last, 2), (due, 1)):
        (tmp_path / "fail").unlink(missing_ok=True)
        fail_from(tmp_path, recipe, step)
        assert checkpoints_of(recipe) == {f"step-{step}"}
        outcome = run(recipe, resume=True)
        assert outcome.finished
        assert outcome.before is not None
        assert steps_of(recipe) == [1, 2]
        assert steps_of(recipe, "evaluations") == [0, 2]


def fail_from(tmp_path: Path, recipe: Recipe, step: int) -> None:
    """Run until the evaluation of `step`, whose reward fails, then mend the reward."""
    with pytest.MonkeyPatch.context() as patch:
        evaluate = Session.evaluate

        def evaluating(self: Session, *args: Any) -> Any:
            if self.done.step == step:
                (tmp_path / "fail").touch()
            return evaluate(self, *args)

        patch.setattr(Session, "evaluate", evaluating)
        with pytest.raises(RunError, match=rf"judge away[\s\S]*checkpoint of step {step} is good"):
            run(recipe)
    (tmp_path / "fail").unlink()


def test_items_that_are_gone_are_asked_again_and_the_evaluation_counts_once(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(steps=1, **{"evaluation.items": 2})
    outcome = run(recipe)
    for path in (recipe.run_dir / "samples").glob("eval-*"):
        path.write_text("")
    again = run(recipe, resume=True)
    assert again.before is None
    assert again.after == outcome.after
    assert steps_of(recipe, "evaluations") == [0, 1]


# -- stopped


def test_a_signal_in_an_evaluation_leaves_it(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first step, and after the last one: no step is lost, and --resume makes up for the evaluation."""
    recipe = make_recipe(steps=1, **{"evaluation.items": 3})
    at_step, done_steps = [0], [-1]
    evaluate, engine_step = Session.evaluate, Engine.step

    def evaluating(self: Session, *args: Any) -> Any:
        done_steps[0] = self.done.step
        try:
            return evaluate(self, *args)
        finally:
            done_steps[0] = -1

    def stepping(self: Engine) -> Any:
        if done_steps == at_step:
            at_step[0] = -2
            os.kill(os.getpid(), signal.SIGHUP)
        return engine_step(self)

    monkeypatch.setattr(Session, "evaluate", evaluating)
    monkeypatch.setattr(Engine, "step", stepping)
    outcome = run(recipe)
    assert (outcome.finished, outcome.step, outcome.before) == (False, 0, None)
    assert "leaving the evaluation before the first step; once more to leave at once" in capsys.readouterr().err
    assert steps_of(recipe, "evaluations") == []

    at_step[0] = 1
    outcome = run(recipe, resume=True)
    assert (outcome.finished, outcome.step, outcome.after) == (False, 1, None)
    assert "leaving the last evaluation" in capsys.readouterr().err
    assert checkpoints_of(recipe) == {"step-1"}
    said = said_of_end(recipe.run_dir)
    assert said == f"the run was stopped after step 1, as was asked; go on with {RESUME}", "its weights are not written"
    outcome = run(recipe, resume=True)
    assert outcome.finished
    assert said_of_end(recipe.run_dir) == "the run finished after step 1"
    assert outcome.after is not None
    assert steps_of(recipe) == [1]
    assert steps_of(recipe, "evaluations") == [0, 1]


def test_a_signal_that_finds_nothing_left_to_stop_is_obeyed_by_what_comes_behind(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is complete; but `plait train … && next` must not go on, nor the stages of a recipe."""
    export_final = Session.export_final

    def exporting(self: Session) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return export_final(self)

    monkeypatch.setattr(Session, "export_final", exporting)
    recipe = make_recipe(steps=1)
    outcome = run(recipe)
    assert (outcome.finished, outcome.asked_to_stop, ended_with(outcome)) == (True, True, 130)
    assert (recipe.run_dir / "final" / "config.json").is_file()
    monkeypatch.undo()
    outcome = run(recipe, resume=True)
    assert (outcome.finished, ended_with(outcome)) == (True, 0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_destructor_while_a_run_is_loading_takes_it_back(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what is raised there, and the run went on to its end."""

    _interrupting(api, "prepare", monkeypatch)
    recipe = make_recipe(run_dir=str(tmp_path / "new" / "run"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    assert run(recipe).finished, "none is left for the next run"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", ["checked", "load_model"])
def test_ctrl_c_in_a_destructor_while_prompts_or_a_model_are_loading_ends_generate(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, place: str
) -> None:
    module = generating if place == "checked" else generate
    _interrupting(module, place, monkeypatch)
    (prompts := tmp_path / "asked.jsonl").write_text('{"prompt": "what is 1 plus 4?"}\n')
    out = tmp_path / "out.jsonl"
    given = ["generate", "--model", make_recipe().model, "--prompts", str(prompts), "--out", str(out)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main([*given, "--dtype", "float32", "--max-tokens", "2"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; nothing is written"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("place", ["prepare", "open_roles"])
def test_ctrl_c_in_a_destructor_while_models_are_loading_ends_eval(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    _interrupting(api if place == "prepare" else measured, place, monkeypatch)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            api.evaluate_model(make_recipe(**{"evaluation.items": 2}))
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupting(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Ctrl-C come in a destructor as a function begins."""

    class Signals:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    as_ever = getattr(module, name)

    def begins(*arguments: Any, **keys: Any) -> Any:
        Signals()
        return as_ever(*arguments, **keys)

    monkeypatch.setattr(module, name, begins)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_run_is_loading_takes_it_back(
    make_recipe: MakeRecipe, tmp_path: Path, number: signal.Signals
) -> None:
    """A terminal that closes sends its signal, and its shell does."""
    path = tmp_path / "recipe.yaml"
    recipe = make_recipe(run_dir=str(tmp_path / "new" / "run"))
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    command = [sys.executable, "-m", "plait", "train", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        assert any("loading tokenizer" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(number)
        while number == signal.SIGHUP and process.poll() is None and (tmp_path / "new").exists():
            time.sleep(0.001)
            process.send_signal(number)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert (process.returncode, rest.splitlines()[-1]) == (130, "interrupted"), rest
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_signal_while_a_model_is_loading_leaves_nothing(
    make_recipe: MakeRecipe, tmp_path: Path, command: str, number: signal.Signals
) -> None:
    recipe = make_recipe(**{"evaluation.items": 2})
    (path := tmp_path / "recipe.yaml").write_text(json.dumps(recipe.model_dump(mode="json")))
    (prompts := tmp_path / "asked.jsonl").write_text('{"prompt": "what is 1 plus 4?"}\n')
    out = tmp_path / "out.jsonl"
    given = {
        "eval": [str(path)],
        "generate": ["--model", recipe.model, "--prompts", str(prompts), "--out", str(out), "--dtype", "float32"],
    }
    before = sorted(tmp_path.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "plait", command, *given[command]],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    try:
        assert any("loading tokenizer" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(number)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    said = {"eval": "interrupted", "generate": "interrupted; nothing is written"}
    assert (process.returncode, rest.splitlines()[-1]) == (130, said[command]), rest
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "ignored"), [(1, False), (1, True), (2, False)])
def test_a_run_outlives_its_terminal(make_recipe: MakeRecipe, tmp_path: Path, *, devices: int, ignored: bool) -> None:
    """It saves as the terminal closes, and ends, or, where SIGHUP is ignored, goes on to its end."""
    write_reward(tmp_path, "(here / 'busy').touch(); import time; time.sleep(0.1)")
    recipe = make_recipe(steps=12, devices=devices)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "plait", "train", str(path)]
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        os.execv(sys.executable, command)
    reader = threading.Thread(target=_read_all, args=(terminal, tmp_path / "closed"), daemon=True)
    reader.start()
    try:
        deadline = time.monotonic() + 600
        while not (tmp_path / "busy").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        (tmp_path / "closed").touch()
        reader.join(60)
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert ended[0] == pid, "it has not ended"
    assert os.waitstatus_to_exitcode(ended[1]) == (0 if ignored else 130)
    steps = steps_of(recipe)
    assert len(steps) == 12 if ignored else 1 <= len(steps) < 12
    assert f"step-{steps[-1]}" in checkpoints_of(recipe)


def _read_all(terminal: int, until: Path) -> None:
    """Read what is written to a terminal, until a file is there; then close it."""
    while not until.exists():
        if select.select([terminal], [], [], 0.02)[0]:
            with contextlib.suppress(OSError):  # nobody has the other end
                os.read(terminal, 4096)
    os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "stopped"), [(1, False), (1, True), (2, True)])
def test_a_run_outlives_who_reads_it(make_recipe: MakeRecipe, tmp_path: Path, *, devices: int, stopped: bool) -> None:
    """As in `plait train … 2>&1 | head`; and behind `| tee`, which a Ctrl-C ends before the run has answered it."""
    write_reward(tmp_path, "print('scored'); import time; time.sleep(0.1)")
    recipe = make_recipe(steps=6, devices=devices)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    command = [sys.executable, "-m", "plait", "train", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        assert any(line.startswith("step 1/6 ") for line in process.stdout)
        process.stdout.close()
        if stopped:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == (130 if stopped else 0)
    finally:
        process.kill()
    steps = steps_of(recipe)
    assert 1 <= len(steps) < 6 if stopped else len(steps) == 6
    assert f"step-{steps[-1]}" in checkpoints_of(recipe)


@pytest.mark.slow
def test_two_signals(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The first is answered with what will be done, the second with what is good, and code 130."""
    write_reward(tmp_path, "(here / 'busy').touch(); import time; time.sleep(60 if (here / 'hang').exists() else 0)")
    recipe = make_recipe(steps=3, **{"checkpoint.every": 1})
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    run(make_recipe(steps=1, **{"checkpoint.every": 1}))
    (tmp_path / "busy").unlink()
    (tmp_path / "hang").touch()
    command = [sys.executable, "-m", "plait", "train", str(path), "--resume"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "busy").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said = [process.stderr.readline()]
        while said[-1] and not said[-1].startswith("finishing"):
            said.append(process.stderr.readline())
        assert said[-1] == "finishing step 2, then saving; once more to leave at once\n"
        assert f"resuming after step 1 of 3, from {recipe.run_dir}/checkpoints/step-1\n" in said
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130
    where = f"{recipe.run_dir}/checkpoints/step-1"
    assert rest == f"left at once; the checkpoint of step 1 is good ({where}); go on from it with {RESUME}\n"

"""Exact resume: a run killed at any moment and resumed ends as the undisturbed one, each step once in every log."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from plait.checkpoint import store
from plait.cli.dry_run import dry_run
from plait.errors import ConfigError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe
from plait.runtime.api import run
from plait.runtime.session import Session
from plait.runtime.steps.calls import Calls
from tests.forked import exit_code_of, forked

MakeRecipe = Callable[..., Recipe]
KEYS: dict[str, Any] = {
    "steps": 5,
    "checkpoint.every": 2,
    "evaluation.items": 3,
    "evaluation.every": 2,
    "options": {"kl_coef": 0.05, "mini_batches": 2, "epochs": 2},
}


def result_of(run_dir: Path) -> dict[str, Any]:
    """Everything that must not depend on the kill."""
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    plain = [{k: v for k, v in row.items() if not k.startswith(("timing_", "perf/"))} for row in metrics]
    evaluations = read_rows(run_dir / "evaluations.jsonl")
    samples = {path.name: path.read_text() for path in sorted((run_dir / "samples").iterdir())}
    weights = hashlib.sha256((run_dir / "final/model.safetensors").read_bytes()).hexdigest()
    last = run_dir / f"checkpoints/step-{metrics[-1]['step']}"
    masters = hashlib.sha256((last / "tensors.safetensors").read_bytes()).hexdigest()
    return {"metrics": plain, "evaluations": evaluations, "samples": samples, "weights": weights, "masters": masters}


def steps_in_trace(run_dir: Path) -> list[int]:
    """The step of each optimizer step in the trace, in order."""
    lines = [line.rstrip(",\n") for line in (run_dir / "trace.json").read_text().splitlines()[1:]]
    events = [json.loads(line) for line in lines if line not in ("", "]")]
    return [event["args"]["step"] for event in events if event["name"].endswith("/step")]


def kill_and_resume(make_recipe: MakeRecipe, tmp_path: Path, points: Sequence[int], seed: int, **keys: Any) -> None:
    """Point 0 of every four is in a save, 1 in an evaluation or at the end (`END`), the others are anywhere."""
    keys = KEYS | keys
    steps, evaluated = list(range(1, keys["steps"] + 1)), [*range(0, keys["steps"], 2), keys["steps"]]
    whole = make_recipe(run_dir=str(tmp_path / "whole"), **keys)
    started = time.monotonic()
    assert exit_code_of(forked(lambda: run(whole))) == 0
    seconds = time.monotonic() - started
    expected = result_of(whole.run_dir)
    assert [row["step"] for row in expected["metrics"]] == steps
    assert [row["step"] for row in expected["evaluations"]] == evaluated

    draw = random.Random(seed)
    killed = 0
    for point in points:
        recipe = make_recipe(run_dir=str(tmp_path / f"killed-{point}"), **keys)
        if point % 4 == 0:
            nth_save = draw.randrange(len(evaluated) - 1)
            killed += kill_inside_save(recipe, nth_save, after_calls=draw.randrange(12))
        elif point % 4 == 1:
            where, method, nth_call = END[point // 4 % len(END)]
            killed += kill_inside(recipe, where, method, nth_call % len(evaluated), after_calls=draw.randrange(8))
        else:
            pid = forked(lambda recipe=recipe: run(recipe))
            time.sleep(draw.uniform(0.0, 1.05 * seconds))
            killed += kill(pid)
        resume = (recipe.run_dir / "recipe.yaml").is_file()  # killed before that, there is nothing to resume
        assert exit_code_of(forked(lambda recipe=recipe, resume=resume: run(recipe, resume=resume))) == 0, point
        assert result_of(recipe.run_dir) == expected, f"kill point {point}"
        assert sorted(set(steps_in_trace(recipe.run_dir))) == steps
        assert len(steps_in_trace(recipe.run_dir)) == 4 * len(steps), "each optimizer step once in the trace"
    assert killed >= (len(points) + 1) // 2, "most points hit a living run"


IN_SAVE_EXPORT_AND_ANYWHERE = (0, 5, 2)
END = [
    (Session, "evaluate", -1),
    (Session, "export_final", 0),
    (Session, "evaluate", 0),
    (Session, "record_evaluation", -1),
    (Session, "record_evaluation", 1),  # with a folder best/
]
"""Class, method, and which of its calls (-1: of the last evaluation): places outside the steps in which a run is
killed."""


def kill(pid: int) -> bool:
    """SIGKILL; whether the child was still alive."""
    done, _ = os.waitpid(pid, os.WNOHANG)
    if done:
        return False
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def kill_inside_save(recipe: Recipe, nth_save: int, after_calls: int) -> bool:
    return kill_inside(recipe, store.CheckpointStore, "save", nth_save, after_calls)


def kill_inside(recipe: Recipe, cls: type, method: str, nth_call: int, after_calls: int) -> bool:
    """The child kills itself at the `after_calls`-th system-level write, sync or rename in a call of a method, or at
    the end of that call."""

    def work() -> None:
        calls = {"made": -1, "left": after_calls, "inside": False}
        original = getattr(cls, method)

        def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls["made"] += 1
            calls["inside"] = calls["made"] == nth_call
            try:
                return original(self, *args, **kwargs)
            finally:
                if calls["inside"]:
                    os.kill(os.getpid(), signal.SIGKILL)

        def dying(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if calls["inside"]:
                    if calls["left"] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    calls["left"] -= 1
                return function(*args, **kwargs)

            return call

        setattr(cls, method, counting)
        for name in ("write", "fsync", "rename", "replace", "open", "mkdir", "unlink"):
            setattr(os, name, dying(getattr(os, name)))
        run(recipe)

    return exit_code_of(forked(work)) == -signal.SIGKILL


def kill_in_step(recipe: Recipe, step: int) -> None:
    """Run until the middle of the training of a step, from 0, which is the last of it."""

    def until_then() -> None:
        over = Calls.over

        def dying(self: Calls, node: Any, state: Any) -> Any:
            if state.step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return over(self, node, state)

        Calls.over = dying  # type: ignore[method-assign]
        run(recipe)

    assert exit_code_of(forked(until_then)) == -signal.SIGKILL


def test_killed_runs_resume_exactly(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    run(make_recipe(run_dir=str(tmp_path / "first"), **KEYS | {"steps": 1}))  # what is done once, no fork does again
    kill_and_resume(make_recipe, tmp_path, points=IN_SAVE_EXPORT_AND_ANYWHERE, seed=0, steps=3)


@pytest.mark.slow
def test_killed_runs_resume_exactly_100(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    kill_and_resume(make_recipe, tmp_path, points=range(100), seed=1)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_with_another_learning_rate(
    make_recipe: MakeRecipe, tmp_path: Path, devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """AdamW without decay moves by a multiple of the rate: of the same gradients and moments, half the rate moves the
    masters half as far."""

    def masters(recipe: Recipe, step: int) -> torch.Tensor:
        files = sorted((recipe.run_dir / f"checkpoints/step-{step}").glob("actor.masters-*.safetensors"))
        return torch.cat([load_file(file)["file"].flatten().view(torch.float64) for file in files])

    (tmp_path / "letters.py").write_text(
        "def letters(completions, **columns):\n    return [len(set(c)) for c in completions]\n"
    )
    keys: dict[str, Any] = {
        "reward.functions": [f"{tmp_path}/letters.py:letters"],
        "dtype": "float64",
        "checkpoint.every": 1,
        "checkpoint.keep_last": 9,
        "devices": devices,
    }
    keys["optimizer.max_grad_norm"] = float("inf")
    plain = make_recipe(run_dir=str(tmp_path / "plain"), **keys)
    run(plain)
    steered = make_recipe(run_dir=str(tmp_path / "steered"), **keys, steps=1)
    run(steered)
    capsys.readouterr()
    run(make_recipe(run_dir=str(steered.run_dir), **keys, **{"optimizer.learning_rate": 5e-4}), resume=True)
    said = "from step 2 on, `optimizer.learning_rate` is 0.0005; it was 0.001"
    assert said in capsys.readouterr().err
    assert [row["actor/lr"] for row in read_rows(steered.run_dir / "metrics.jsonl")] == [1e-3, 5e-4]
    assert load_recipe(steered.run_dir / "recipe.yaml").optimizer.learning_rate == 5e-4
    stays = json.loads((steered.run_dir / "run.json").read_text())["stays"]
    assert [stay["steering"]["optimizer.learning_rate"] for stay in stays] == [1e-3, 5e-4]
    with pytest.raises(ConfigError, match=r"has done all of its steps.* other values of `optimizer\.learning_rate`"):
        run(make_recipe(run_dir=str(steered.run_dir), **keys), resume=True)
    with pytest.raises(ConfigError, match=r"has done all of its steps"):
        dry_run(make_recipe(run_dir=str(steered.run_dir), **keys), resume=True)
    assert load_recipe(steered.run_dir / "recipe.yaml").optimizer.learning_rate == 5e-4
    before = masters(plain, 1)
    torch.testing.assert_close(masters(steered, 1), before, rtol=1e-9, atol=1e-9)
    moved, half = masters(plain, 2) - before, masters(steered, 2) - before
    assert moved.abs().max() > 1e-4
    torch.testing.assert_close(half, moved / 2, rtol=1e-6, atol=1e-9)

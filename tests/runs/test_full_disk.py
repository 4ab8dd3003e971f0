"""A disk that is full, wherever a run writes: said once, with the checkpoint that is good; and one that will be, before
any work."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from plait.checkpoint import store
from plait.errors import ConfigError, RunError
from plait.models.files.saving import save_pretrained
from plait.models.files.tensor_file import write_tensor_file
from plait.observe.run_log import RunLog
from plait.runtime import api
from plait.runtime.api import run
from plait.runtime.folder import export
from plait.runtime.prediction.disk_room import KeptFiles
from plait.runtime.prepare import prepare
from plait.runtime.session import Session
from tests.runs.test_breaking_off import MakeRecipe, checkpoints_of, steps_of, write_reward

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_log(name: str) -> Callable[[pytest.MonkeyPatch, list[bool]], None]:
    def inject(patch: pytest.MonkeyPatch, full: list[bool]) -> None:
        write = os.write

        def writing(fd: int, data: bytes) -> int:
            if full and os.readlink(f"/proc/self/fd/{fd}").endswith(name):
                write(fd, data[: len(data) // 2])
                raise FULL
            return write(fd, data)

        patch.setattr(os, "write", writing)

    return inject


def full_samples(patch: pytest.MonkeyPatch, full: list[bool]) -> None:
    replace = os.replace

    def replacing(source: Any, target: Any) -> None:
        if full and "samples" in str(target):
            raise FULL
        replace(source, target)

    patch.setattr(os, "replace", replacing)


def full_export(name: str, error: Exception) -> Callable[[pytest.MonkeyPatch, list[bool]], None]:
    def inject(patch: pytest.MonkeyPatch, full: list[bool]) -> None:
        def saving(model: Any, folder: Path, **marked: Any) -> None:
            if full and folder.name == name:
                raise error
            save_pretrained(model, folder, **marked)

        patch.setattr(export, "save_pretrained", saving)

    return inject


@pytest.mark.parametrize(
    ("inject", "what"),
    [
        (full_log("metrics.jsonl"), "metrics.jsonl cannot be written: No space left on device"),
        pytest.param(
            full_log("evaluations.jsonl"),
            "evaluations.jsonl cannot be written: No space left on device",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            full_log("trace.json"),
            "trace.json cannot be written: No space left on device",
            marks=pytest.mark.slow,
        ),
        (full_samples, r"step-000003\.jsonl cannot be written: No space left on device"),
        pytest.param(
            full_export("best", FULL),
            r"best weights so far cannot be written to .*best: .*No space left",
            marks=pytest.mark.slow,
        ),
        (
            full_export("final", SafetensorError("No space left")),
            r"final weights cannot be written to .*final: No space",
        ),
    ],
    ids=["metrics", "evaluations", "trace", "samples", "best", "final"],
)
def test_a_full_disk_is_said_and_the_run_goes_on_from_the_checkpoint_that_is_named(
    make_recipe: MakeRecipe, tmp_path: Path, inject: Callable[[pytest.MonkeyPatch, list[bool]], None], what: str
) -> None:
    """The disk is full in the third and last step. The reward makes each evaluation better than the one before."""
    counting = "n = here / 'calls'; k = len(n.read_text()) if n.exists() else 0\n"
    write_reward(
        tmp_path, f"{counting}    n.write_text('x' * (k + 1))\n    if evaluates: return [float(k)] * len(completions)"
    )
    recipe = make_recipe(steps=3, **{"checkpoint.every": 1, "evaluation.items": 2, "evaluation.every": 1})
    full: list[bool] = []
    run_step = api.train_session.__globals__["run_step"]

    def fill(opened: Session) -> Any:
        if opened.done.step == 2:
            full.append(True)
        return run_step(opened)

    with pytest.MonkeyPatch.context() as patch:
        inject(patch, full)
        patch.setitem(api.train_session.__globals__, "run_step", fill)
        with pytest.raises(RunError, match=what) as caught:
            run(recipe)
    good = max(checkpoints_of(recipe), key=lambda name: int(name.removeprefix("step-")))
    assert good in ("step-2", "step-3")
    assert f"{recipe.run_dir}/checkpoints/{good}" in str(caught.value)
    assert str(caught.value).count("is good") == 1
    assert run(recipe, resume=True).finished
    assert steps_of(recipe) == [1, 2, 3]
    assert steps_of(recipe, "evaluations") == [0, 1, 2, 3]


def test_a_full_disk_in_a_save_is_said_once(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(steps=3, **{"checkpoint.every": 2})
    written: list[Any] = []

    def writing(*args: Any) -> Any:
        written.append(args)
        if len(written) > 1:
            raise FULL
        return write_tensor_file(*args)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_tensor_file", writing)
        with pytest.raises(RunError, match=r"^the checkpoint of step 3 cannot be written .*No space left") as caught:
            run(recipe)
    assert len(written) == 2, "one try"
    assert str(caught.value).count("good") == 1
    assert f"the last good one is step 2, {recipe.run_dir}/checkpoints/step-2" in str(caught.value)
    assert run(recipe, resume=True).finished
    assert steps_of(recipe) == [1, 2, 3]


def test_logs_that_cannot_be_forced_to_disk_are_said_once(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 1 stands; that of step 2 is not begun."""
    recipe = make_recipe(steps=3, **{"checkpoint.every": 1})
    sound = RunLog.sync

    def fails_later(log: RunLog) -> None:
        if checkpoints_of(recipe):
            raise FULL
        sound(log)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "sync", fails_later)
        with pytest.raises(RunError, match=r"^the logs in .* cannot be written: No space left") as caught:
            run(recipe)
    assert str(caught.value).count("cannot be written") == 1
    assert str(caught.value).count(f"the checkpoint of step 1 is good ({recipe.run_dir}/checkpoints/step-1)") == 1
    assert run(recipe, resume=True).finished
    assert steps_of(recipe) == [1, 2, 3]


def tensor_bytes(file: Path) -> int:
    """Of a safetensors file, which begins with the length of its header."""
    data = file.read_bytes()
    return len(data) - 8 - int.from_bytes(data[:8], "little")


@pytest.mark.parametrize(
    ("keys", "checkpoints"),
    [
        ({"steps": 1}, 1),
        ({"steps": 3, "checkpoint.every": 1, "checkpoint.keep_last": 1}, 2),
        ({"steps": 1, "dtype": "bfloat16", "reference.sync_every": 1}, 1),
        ({"steps": 1, "lora.rank": 4}, 1),
        ({"steps": 2, "evaluation.items": 1, "evaluation.every": 1, "algorithm": "ppo", "options": {}}, 1),
    ],
    ids=["float32", "two checkpoints", "followed, bfloat16", "adapter", "two roles, best"],
)
def test_what_a_run_keeps_is_foretold(make_recipe: MakeRecipe, keys: dict[str, Any], checkpoints: int) -> None:
    recipe = make_recipe(**keys)
    kept = KeptFiles.of(prepare(recipe))
    assert kept.checkpoints == checkpoints, "one more than are kept, while the newest is written"
    assert run(recipe).finished
    folder = Path(recipe.run_dir)
    written = lambda *places: sum(map(tensor_bytes, (file for at in places for file in at.rglob("*.safetensors"))))
    newest = max((folder / "checkpoints").iterdir(), key=lambda path: path.name)
    assert kept.checkpoint_bytes == pytest.approx(written(newest), rel=0.01)
    assert kept.weights_bytes == pytest.approx(written(folder / "final", folder / "best"), rel=0.01)


def test_a_run_that_would_fill_the_disk_is_refused_before_any_work(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier run has there counts as free; a finished run is asked for nothing."""
    recipe = make_recipe(steps=2, **{"checkpoint.every": 1})
    needed = KeptFiles.of(prepare(recipe)).total_bytes
    free: list[int] = [needed - 4096]
    system = os.statvfs

    class Room:
        f_frsize, f_blocks = 1, 1 << 40

        def __init__(self, path: Any) -> None:
            assert system(path).f_blocks, "a folder that is there"
            self.f_bavail = free[-1]

    monkeypatch.setattr(os, "statvfs", Room)
    with pytest.raises(ConfigError, match=r"^key `run_dir`: the run keeps up to .* \(2 checkpoints of .* are free"):
        run(recipe)
    assert not Path(recipe.run_dir).exists()
    free.append(needed)
    assert run(recipe).finished
    free.append(4096)
    assert run(recipe.model_copy(update={"overwrite": True})).finished
    free.append(0)
    assert run(recipe, resume=True).finished

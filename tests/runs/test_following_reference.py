"""A reference that follows the policy: what it becomes, when, and after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import ConfigError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.session import Session
from plait.runtime.steps.step import StepState
from plait.workers.worker_group import WorkerGroup
from tests.runs.plans import assert_equal_runs, metrics_of

MakeRecipe = Callable[..., Recipe]
KEYS: dict[str, Any] = {"steps": 4, "dtype": "float64", "optimizer.learning_rate": 0.01}


def kl_of(recipe: Recipe) -> list[float]:
    run(recipe)
    return [float(row["kl"]) for row in read_rows(recipe.run_dir / "metrics.jsonl")]


@pytest.mark.slow
def test_a_copy_of_the_policy_after_every_step_has_no_kl_to_it(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    assert kl_of(make_recipe(**KEYS))[-1] > 0.1
    followed = make_recipe(
        **KEYS, run_dir=str(tmp_path / "copy"), **{"reference.sync_every": 1, "reference.mixup": 1.0}
    )
    assert kl_of(followed) == pytest.approx([0.0] * 4, abs=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_it_is_a_slow_average_of_the_policy(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    sync = WorkerGroup.sync_references

    def watched(workers: WorkerGroup, share: float | None) -> None:
        sync(workers, share)
        masters = workers.rank_state.roles["actor"].trainer.optimizer.masters  # type: ignore[union-attr]
        seen.append((masters.clone(), workers.model("ref").trained.flat.flat("cpu").clone()))

    monkeypatch.setattr(WorkerGroup, "sync_references", watched)
    keys = KEYS | {"dtype": dtype, "reference.sync_every": 2, "reference.mixup": 0.25}
    began = torch.empty(0)
    original = WorkerGroup.performance

    def at_first(workers: WorkerGroup) -> dict[str, float]:
        nonlocal began
        if not len(began):
            began = workers.model("ref").trained.flat.flat("cpu").clone()
        return original(workers)

    monkeypatch.setattr(WorkerGroup, "performance", at_first)
    run(make_recipe(**keys))
    assert len(seen) == 2, "after steps 2 and 4"
    expected = began.to(seen[0][0].dtype)
    for masters, reference in seen:
        expected = 0.25 * masters + 0.75 * expected
        torch.testing.assert_close(reference, expected.to(reference.dtype))
    assert not torch.equal(seen[0][1], seen[1][1])


def test_a_resumed_run_has_the_same_reference(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    keys = KEYS | {"reference.sync_every": 2, "reference.mixup": 0.5}
    whole = make_recipe(**keys, run_dir=str(tmp_path / "whole"))
    run(whole)
    run(make_recipe(**keys | {"steps": 3}, run_dir=str(tmp_path / "parts")))
    parts = make_recipe(**keys, run_dir=str(tmp_path / "parts"))
    run(parts, resume=True)
    assert_equal_runs(parts.run_dir, whole.run_dir, tolerance=0.0)
    assert metrics_of(parts.run_dir)[3]["kl"] > 0


def test_the_doctor_knows_when_it_may_change(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KEYS | {"steps": 3, "reference.sync_every": 2, "reference.mixup": 0.5, "run_dir": str(tmp_path / "run")}

    def is_said() -> bool:
        return "after its last sync" in (tmp_path / "run" / "doctor.jsonl").read_text()

    run(make_recipe(**keys))
    assert not is_said()
    begin = Session.begin_step

    def meddled(session: Session) -> StepState:
        session.workers.model("ref").weights.add_(0.1 if session.done.step == 2 else 0.0)
        return begin(session)

    monkeypatch.setattr(Session, "begin_step", meddled)
    run(make_recipe(**keys, overwrite=True))
    assert is_said(), "it has changed in step 3, which syncs nothing"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"options": {}, "reference.sync_every": 2}, "`reference` is set, but the flow `grpo` asks no reference"),
        ({"reference.sync_every": 2, "lora.rank": 4}, "with adapters"),
        ({"reference.sync_every": 2, "reference.model": "teacher"}, "model is `teacher`, but a reference that follows"),
        ({"reference.mixup": 0.5}, "set `reference.sync_every` above 0"),
        ({"reference.sync_every": 2, "reference.mixup": 0.0}, "reference.mixup"),
    ],
)
def test_what_would_say_nothing_is_refused(make_recipe: MakeRecipe, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(make_recipe(**keys))

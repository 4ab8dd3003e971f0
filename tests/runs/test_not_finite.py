"""A run whose weights are no numbers any more stops when it would save them; the last good checkpoint stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.checkpoint.store import CheckpointStore
from plait.cli import main
from plait.errors import RunError
from plait.runtime import api
from plait.runtime.api import run
from plait.runtime.folder.export import trained_roles
from plait.runtime.session import Session
from tests.cases import slow_but
from tests.runs.test_breaking_off import MakeRecipe, checkpoints_of, steps_of

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"


def poisoned_after(step: int, buffer: str, patch: pytest.MonkeyPatch) -> None:
    """One element of the actor's masters or moments becomes infinite."""
    run_step = api.train_session.__globals__["run_step"]

    def poison(session: Session) -> Any:
        metrics = run_step(session)
        if session.done.step == step:
            trainer = session.workers.rank_state.roles["actor"].trainer
            assert trainer is not None
            trainer.optimizer.buffers()[buffer][3] = torch.inf
        return metrics

    patch.setitem(api.train_session.__globals__, "run_step", poison)


@pytest.mark.parametrize("buffer", slow_but(["masters"], ["masters", "exp_avg_sq"]))
def test_what_is_not_finite_is_not_saved(make_recipe: MakeRecipe, buffer: str) -> None:
    recipe = make_recipe(steps=4, **{"checkpoint.every": 1, "doctor.enabled": False})
    with pytest.MonkeyPatch.context() as patch:
        poisoned_after(2, buffer, patch)
        with pytest.raises(RunError, match=rf"step 2: 1 tensor is not finite: actor\.{buffer} of ") as caught:
            run(recipe)
    assert "(1 of " in str(caught.value)
    assert str(caught.value).count("good") == 1
    assert f"the last good one is step 1, {recipe.run_dir}/checkpoints/step-1" in str(caught.value)
    assert checkpoints_of(recipe) == {"step-1"}
    assert not (recipe.run_dir / "final").exists()
    assert run(recipe, resume=True).finished
    assert steps_of(recipe) == [1, 2, 3, 4]


@pytest.mark.parametrize("when", ["best", "final"])
def test_nor_exported_by_the_run(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The working weights alone are broken: between the last step, or one before, and what is written of it."""
    recipe = make_recipe(steps=2, **{"evaluation.items": 2, "evaluation.every": 1 if when == "best" else 0})
    method = "record_evaluation" if when == "best" else "export_final"
    write = getattr(Session, method)

    def poisoned(session: Session, *args: Any) -> None:
        if session.done.step > 0:
            session.workers.rank_state.roles["actor"].model.weights[3] = torch.nan  # type: ignore[union-attr]
        write(session, *args)

    monkeypatch.setattr(Session, method, poisoned)
    with pytest.raises(RunError, match=rf"weights .*/{when}: .* 1 tensor is not finite"):
        run(recipe)
    assert not (recipe.run_dir / when).exists()


def test_nor_by_the_command_and_an_earlier_step_still_is(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that a plait wrote that did not look."""
    recipe = make_recipe(steps=2, **{"checkpoint.every": 1})
    with monkeypatch.context() as patch:
        poisoned_after(2, "masters", patch)
        patch.setattr("plait.workers.rank_optimizers.broken_state", lambda *_: [])
        patch.setattr(Session, "export_final", lambda self: None)
        run(recipe)
    asked = ["export", str(recipe.run_dir), "--out", str(tmp_path / "out")]
    assert main(asked) == 2
    assert "1 tensor is not finite: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*asked, "--step", "1"]) == 0


def test_an_export_of_a_checkpoint_that_does_not_say_what_was_trained() -> None:
    """Early versions did not; tests/golden has some of their checkpoints."""
    for name, roles in (("ppo-1", ["actor", "critic"]), ("grpo-tp2", ["actor"])):
        checkpoint = CheckpointStore(GOLDEN / name / "checkpoints", keep_last=1).at(2)
        assert "trained" not in checkpoint.state
        assert trained_roles(checkpoint) == roles


@pytest.mark.slow
def test_nor_saved_by_several_ranks(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """The share of rank 1 alone is broken, after its second step."""
    (tmp_path / "flow.py").write_text(
        "import torch.distributed as dist\n"
        "from plait.algorithms.grpo import grpo as grpo\n"
        "from plait.training.optimizer import MasterOptimizer\n\n"
        "step, calls = MasterOptimizer.step, []\n\n"
        "def poisoned(self, *args, **kwargs):\n"
        "    report = step(self, *args, **kwargs)\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2 and dist.is_initialized() and dist.get_rank() == 1:\n"
        "        self.masters[3] = float('inf')\n"
        "    return report\n\n"
        "MasterOptimizer.step = poisoned\n"
    )
    keys = {"checkpoint.every": 1, "options": {"kl_coef": 0.05, "mini_batches": 1}, "doctor.enabled": False}
    recipe = make_recipe(algorithm=f"{tmp_path}/flow.py:grpo", steps=3, plan="colocated", devices=2, **keys)
    with pytest.raises(RunError, match=r"step 2: 1 tensor is not finite: actor\.masters of ") as caught:
        run(recipe)
    assert "the last good one is step 1" in str(caught.value)
    assert checkpoints_of(recipe) == {"step-1"}

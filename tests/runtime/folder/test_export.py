"""`plait export`: which model of a run is written, from one process or several, and what stays as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from plait.cli import main
from plait.errors import ConfigError
from plait.output import MARKER
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder import export
from plait.runtime.folder.export import export_checkpoint
from plait.workers.loading import build_models
from tests.cases import slow_but

MakeRecipe = Callable[..., Recipe]
PPO = {"algorithm": "ppo", "steps": 1, "options": {"mini_batches": 1}}


@pytest.fixture(params=slow_but(["one process"], ["one process", "parts of two ranks"]))
def trained(request: pytest.FixtureRequest, make_recipe: MakeRecipe, tmp_path: Path) -> Recipe:
    """A run that has trained an actor and a critic, with a reward from which a critic learns at once."""
    (tmp_path / "lengths.py").write_text(
        "def length(completions, **_):\n    return [1.0 + len(c) for c in completions]\n"
    )
    ranks = {} if request.param == "one process" else {"plan": "colocated", "devices": 2}
    recipe = make_recipe(**PPO, **ranks, **{"reward.functions": [f"{tmp_path}/lengths.py:length"]})
    run(recipe)
    return recipe


def test_a_critic_is_exported_as_a_scalar_model(trained: Recipe, tmp_path: Path) -> None:
    written = export_checkpoint(trained.run_dir, tmp_path / "critic", role="critic")
    assert (written.step, written.role, written.dtype) == (1, "critic", "float32")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert critic.config.num_labels == 1
    assert critic.score.weight.abs().max() > 0, "a new head is 0 before it is trained"
    assert export_checkpoint(trained.run_dir, tmp_path / "actor").role == "actor"
    final, actor = (
        load_file(folder / "model.safetensors") for folder in (trained.run_dir / "final", tmp_path / "actor")
    )
    assert final.keys() == actor.keys()
    assert all(torch.equal(final[name], actor[name]) for name in final)
    told = json.loads((tmp_path / "critic" / MARKER).read_text())
    assert (told["role"], told["step"], told["run"]) == ("critic", 1, trained.run_dir.name)
    with pytest.raises(ConfigError, match="--role: the run has not trained `reward`; it has trained: actor, critic"):
        export_checkpoint(trained.run_dir, tmp_path / "reward", role="reward")


def test_a_checkpoint_that_the_run_removes_meanwhile_is_chosen_again(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on keeps `checkpoint.keep_last` of them, and a model takes long to be read."""
    recipe = make_recipe(steps=2, **{"checkpoint.every": 1})
    run(recipe)
    newest = recipe.run_dir / "checkpoints" / "step-2"

    def built(*arguments: Any) -> Any:
        models = build_models(*arguments)
        if newest.exists():
            newest.rename(newest.with_suffix(".old.tmp"))
        return models

    monkeypatch.setattr(export, "build_models", built)
    assert export_checkpoint(recipe.run_dir, tmp_path / "out").step == 1
    newest.with_suffix(".old.tmp").rename(newest)
    with pytest.raises(ConfigError, match=r"^--step: .* has no checkpoint of step 2; there are: 1$"):
        export_checkpoint(recipe.run_dir, tmp_path / "stated", step=2)


def test_no_export_takes_the_place_of_a_run(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(steps=1)
    run(recipe)
    before = sorted(map(str, tmp_path.rglob("*")))
    for out in (recipe.run_dir, recipe.run_dir / "final", recipe.run_dir / "new", tmp_path):
        assert main(["export", str(recipe.run_dir), "--out", str(out), "--overwrite"]) == 2
        assert "--out: " in capsys.readouterr().err
    assert sorted(map(str, tmp_path.rglob("*"))) == before

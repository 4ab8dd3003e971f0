"""A model that reads images too is trained on texts: what no text reaches stays as it was read, on any plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plait.models import admission, working_weights
from plait.models.files.saving import save_pretrained
from plait.models.language_loading import from_module
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.export import export_checkpoint
from tests.cases import slow_but
from tests.models.tiny import tiny_tokenizer, tiny_with_images
from tests.runs.plans import assert_equal_runs, planned

MakeRecipe = Callable[..., Recipe]
KEYS: dict[str, Any] = {"optimizer.weight_decay": 0.5, "options": {"kl_coef": 0.5}, "checkpoint.every": 1}


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """The folder of a model that reads images."""
    module = tiny_with_images(dtype=torch.float64)
    save_pretrained(from_module(module, tiny_tokenizer(), "float64"), tmp_path / "reader")
    return tmp_path / "reader"


def parts(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What texts reach of a folder's weights, and what they do not."""
    stored = load_file(folder / "model.safetensors")
    beside = {name: stored.pop(name) for name in list(stored) if name.startswith(("vision_tower", "multi_modal"))}
    return stored, beside


def assert_left_alone(folder: Path, reader: Path) -> None:
    """All that texts reach has been trained, and nothing else has changed by a bit."""
    (texts, beside), (first, read) = parts(folder), parts(reader)
    assert len(beside) == 50
    assert texts.keys() == first.keys()
    assert beside.keys() == read.keys()
    assert all(torch.equal(tensor, read[name]) for name, tensor in beside.items())
    assert not any(torch.equal(tensor, first[name]) for name, tensor in texts.items())


PLANS = {"one": None, "dp2": "0,1 dp2", "tp2": "0,1 tp2", "pp2": "0,1 pp2"}


@pytest.mark.parametrize("plan", slow_but(["one"], PLANS))
def test_what_no_text_reaches_stays_as_it_was_read(
    make_recipe: MakeRecipe, reader: Path, tmp_path: Path, plan: str
) -> None:
    calls = ("actor.generate", "ref.logprobs", "actor.train")
    where = PLANS[plan]
    places = None if where is None else dict.fromkeys(calls, where)
    recipe = planned(make_recipe, tmp_path, plan, places, model=str(reader), **KEYS)
    run(recipe)
    assert_left_alone(recipe.run_dir / "final", reader)
    export_checkpoint(recipe.run_dir, tmp_path / "exported")
    assert_left_alone(tmp_path / "exported", reader)
    if places is not None:
        whole = planned(make_recipe, tmp_path, "whole", model=str(reader), **KEYS)
        run(whole)
        assert_equal_runs(recipe.run_dir, whole.run_dir)


def test_a_checkpoint_that_has_it_is_gone_on_with(
    make_recipe: MakeRecipe, reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of earlier versions have, which trained it."""
    recipe = planned(make_recipe, tmp_path, "earlier", model=str(reader), **KEYS)
    with monkeypatch.context() as patch:
        patch.setattr(working_weights, "unreached", lambda module: [])
        patch.setattr(admission, "unreached", lambda module: [])
        run(recipe)
    _, beside = parts(recipe.run_dir / "final")
    _, read = parts(reader)
    assert any(not torch.equal(tensor, read[name]) for name, tensor in beside.items())
    keys: dict[str, Any] = KEYS | {"steps": 3}
    run(planned(make_recipe, tmp_path, "earlier", model=str(reader), **keys), resume=True)
    whole = planned(make_recipe, tmp_path, "whole", model=str(reader), **keys)
    run(whole)
    assert_equal_runs(recipe.run_dir, whole.run_dir)

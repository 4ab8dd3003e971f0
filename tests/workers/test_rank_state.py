"""What a rank holds of all roles, by what it was told of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from plait.launch.group import Group
from plait.models.loading import load_model
from plait.models.lora import add_lora
from plait.models.lora_files import save_adapter
from plait.models.lora_settings import LoraSettings
from plait.recipes.recipe import Recipe
from plait.runtime.prepare import prepare
from plait.runtime.processes.measured import of_asked
from plait.workers.loading import build_models, room_for
from plait.workers.rank_state import RankState, Setting
from plait.workers.role_builder import make_rank_state
from tests.runs.plan_files import write_plan

PLACES = {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"}


def test_a_pair_takes_what_the_plan_says(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """A number that is stated, else what follows from the model's shape; nothing where the plan does not say it."""

    def pair_tokens(**policies: dict[str, float]) -> dict[str, float]:
        one = prepare(make_recipe(plan=str(write_plan(tmp_path, "plan", PLACES, policies=policies))))
        setting = Setting(one.recipe, one.flow, one.models, one.plan, 0, lambda what: nullcontext())
        return RankState(setting, {}, {}, {}).pair_tokens

    assert pair_tokens() == {"actor": 0.0, "ref": 0.0}
    by_shape = pair_tokens(shares={})
    assert by_shape["actor"] == by_shape["ref"] > 0
    assert pair_tokens(shares={"actor": 0.25}) == {"actor": 0.25, "ref": pytest.approx(by_shape["ref"])}


def test_what_an_adapter_is_brought_to_has_no_weights_under_it(make_recipe: Callable[..., Recipe]) -> None:
    """Only what is trained is moved to the rank that writes it, and only that has memory there."""
    pytest.importorskip("peft")
    one = prepare(make_recipe(**{"lora.rank": 2}))
    actor = next(model for model in one.models if model.trained)
    room = room_for(actor, one.recipe)
    (read,) = build_models([actor], one.recipe).values()
    assert room.weights.is_meta
    assert room.trained.weights.device.type == "cpu"
    assert room.trained.layout == read.trained.layout
    whole = room_for(actor, make_recipe())
    assert whole.trained.weights.device.type == "cpu"
    assert whole.trained.layout == read.layout


def rank_of_own(worker: Any, setting: tuple[Any, ...]) -> int | None:
    """In a worker process: the rank of the adapter that its part of the actor has beside the weights."""
    actor = make_rank_state(Setting(*setting, worker.rank, lambda what: nullcontext())).roles["actor"].model
    settings = None if actor.own is None else actor.own.settings
    return None if settings is None else settings.rank


@pytest.mark.process
def test_parts_of_what_is_only_measured_have_its_adapter_beside_them(
    make_recipe: Callable[..., Recipe], tiny_folder: Path, tmp_path: Path, two: Group
) -> None:
    """As a whole model has, of an evaluation; where roles are trained without `lora`, it is merged."""
    pytest.importorskip("peft")
    base = load_model(str(tiny_folder), dtype="float32")
    save_adapter(add_lora(base, LoraSettings(rank=3), name="sft", seed=0), tmp_path / "adapter")
    places = dict.fromkeys(("actor.generate", "actor.train", "ref.logprobs"), "0,1 tp2")
    keys = {"model": str(tmp_path / "adapter"), "plan": str(write_plan(tmp_path, "cut", places))}
    found = {}
    for trains in (True, False):
        one = prepare(make_recipe(**keys), trains=trains)
        one = one if trains else of_asked(one)
        setting = (one.recipe, one.flow, one.models, one.plan)
        asked = two.submit(range(2), "run", "tests.workers.test_rank_state", "rank_of_own", setting)
        found[trains] = asked.result(120.0)
    assert found == {True: [None, None], False: [3, 3]}

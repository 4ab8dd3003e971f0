"""What a rank holds of all roles, by what it was told of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.prepare import prepare
from plait.workers.loading import build_models, room_for
from plait.workers.rank_state import RankState, Setting
from tests.runs.plans import write_plan

PLACES = {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"}


def test_a_pair_takes_what_the_plan_says(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """A number that is stated, else what follows from the model's shape; nothing where the plan does not say it."""

    def pair_tokens(**policies: dict[str, float]) -> dict[str, float]:
        one = prepare(make_recipe(plan=str(write_plan(tmp_path, "plan", PLACES, policies=policies))))
        setting = Setting(one.recipe, one.flow, one.models, one.plan, 0, lambda what: nullcontext())
        return RankState(setting, {}).pair_tokens

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

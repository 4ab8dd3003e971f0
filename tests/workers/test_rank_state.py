"""What a rank holds of all roles, by what it was told of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.prepare import prepare
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

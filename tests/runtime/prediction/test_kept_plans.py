"""Which plan that was found before holds for a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plait.errors import DataError
from plait.recipes.recipe import Recipe
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import NOTHING_KEPT, Kept
from plait.runtime.prediction.kept_plans import kept_for
from plait.schedule.plan import Placement, Plan

FOUND = Plan("auto", 2, (Placement("actor.train", "train", (0, 1), dp=2),))
"""The plan of a search for two devices of one machine."""


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe]) -> Recipe:
    return make_recipe(devices=2, plan="auto")


@pytest.fixture
def begun(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


def test_a_run_follows_the_plan_that_was_found_when_it_was_checked(recipe: Recipe) -> None:
    assert kept_for(recipe, 1, None) == NOTHING_KEPT
    assert kept_for(recipe, 1, None, FOUND) == Kept(FOUND, FOUND)


def test_a_plan_of_other_places_says_its_settings_alone(recipe: Recipe) -> None:
    assert kept_for(recipe, 2, None, FOUND) == Kept(None, FOUND), "two machines"
    assert kept_for(recipe.model_copy(update={"devices": 4}), 1, None, FOUND) == Kept(None, FOUND)


def test_a_plan_that_no_search_found_is_not_taken_for_one(recipe: Recipe) -> None:
    named = replace(FOUND, name="split")
    assert kept_for(recipe, 1, None, named) == Kept(None, named)
    assert kept_for(recipe.model_copy(update={"plan": "split"}), 1, None, FOUND) == Kept(None, FOUND)


def test_the_plan_of_the_stay_before_comes_first(recipe: Recipe, begun: RunFiles) -> None:
    assert kept_for(recipe, 1, begun, FOUND) == Kept(FOUND, FOUND), "none was written"
    stored = replace(FOUND, placements=(Placement("actor.train", "train", (0, 1), tp=2),))
    stored.save(begun.plan)
    assert kept_for(recipe, 1, begun, FOUND) == Kept(stored, stored)
    elsewhere = Plan("auto", 1, (Placement("actor.train", "train", (0,)),))
    elsewhere.save(begun.plan)
    assert kept_for(recipe, 1, begun, FOUND) == Kept(FOUND, elsewhere), "it was found anew when it was checked"


def test_a_plan_that_cannot_be_read_is_an_error_only_where_it_would_be_followed(
    recipe: Recipe, begun: RunFiles
) -> None:
    begun.plan.write_text("{")
    with pytest.raises(DataError):
        kept_for(recipe, 1, begun)
    assert kept_for(recipe.model_copy(update={"plan": "split"}), 1, begun) == NOTHING_KEPT

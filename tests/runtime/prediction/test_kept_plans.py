"""Which plan that was found before holds for a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plait.cost.placement import resolve_plan
from plait.errors import DataError
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.folder.run_files import RunFiles
from plait.runtime.inputs.prepared import NOTHING_KEPT, Kept
from plait.runtime.prediction.kept_plans import kept_for, of_flow
from plait.runtime.prepare import outline
from plait.schedule.plan import Placement, Plan
from tests.runs.profiles import keep_made_up_profile

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
    with pytest.raises(DataError, match=r"put a copy back, or remove the file and a new plan is searched for$"):
        kept_for(recipe, 1, begun)
    assert kept_for(recipe.model_copy(update={"plan": "split"}), 1, begun) == NOTHING_KEPT
    assert kept_for(recipe, 1, begun, FOUND) == Kept(FOUND, FOUND), "of a stage that is done, whose plan was checked"


def test_a_plan_of_other_calls_than_the_flow_has_is_found_anew(
    make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference is there with `kl_coef`."""
    alone, referred = (outline(make_recipe(options={"kl_coef": coef})) for coef in (0.0, 0.1))
    plan = resolve_plan(alone.recipe, alone.flow, alone.models, alone.shapes)
    assert of_flow(None, alone) is None
    assert of_flow(plan, alone) is plan
    assert capsys.readouterr().err == ""
    assert of_flow(plan, referred) is None
    assert "other calls than the plan that was found before (ref.logprobs)" in capsys.readouterr().err


FLOW = """
from plait.dataflow import Role, Prompts, per_group

def flow(prompts: Prompts, actor: Role, ref: Role) -> None:
    samples = actor.generate(prompts)
    numbers = actor.logprobs(samples)
    actor.train(samples, loss=loss, weights=per_group(weighed, numbers, name="weights"))

def weighed(numbers):
    return [each.mean() for each in numbers]

def loss(batch, weights):
    return batch.aggregate(-weights * batch.logprobs, "token-mean")
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_run_whose_flow_has_another_call_goes_on(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(FLOW)
    own = {"algorithm": f"{file}:flow", "options": {}, "reward.functions": []}
    recipe = make_recipe(**own, devices=2, plan="auto", steps=1)
    keep_made_up_profile(recipe)
    run(recipe)
    file.write_text(FLOW.replace("numbers = actor.logprobs", "numbers = ref.logprobs"))
    assert run(recipe.model_copy(update={"steps": 2}), resume=True).step == 2
    calls = {p.call for p in Plan.load(Path(recipe.run_dir) / "plan.json").placements}
    assert calls == {"actor.generate", "ref.logprobs", "actor.train"}

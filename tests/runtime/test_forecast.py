"""A plan that is found before a run, its prediction beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.cost.calibration import CONSERVATIVE
from plait.cost.profile import Profile
from plait.cost.workload import Lengths
from plait.errors import ConfigError
from plait.models.files.hub import read_config
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.runtime import machine
from plait.runtime.forecast import STEP, Beside, forecast_beside, predicted_seconds
from plait.runtime.lengths import lengths_of
from plait.runtime.machine import measured_machine
from plait.runtime.prepare import prepare
from plait.runtime.stored_recipe import as_begun, changed_keys, recipe_text
from plait.schedule.plan import Plan
from plait.schedule.timeline import Span, Timeline
from tests.runs.plans import write_plan
from tests.runs.profiles import keep_made_up_profile

MakeRecipe = Callable[..., Recipe]


def test_beside_by_hand() -> None:
    """Two steps of 4 s: generation 2 s on rank 0 and 3 on rank 1, training 1 s; the first measured step is left out."""
    spans = [
        Span(action, kind, rank, start + 4 * (step - 1), end + 4 * (step - 1), step=step)
        for step in (1, 2)
        for action, kind, rank, start, end in (
            ("actor.generate", "DECODE", 0, 0.0, 2.0),
            ("actor.generate", "DECODE", 1, 0.0, 3.0),
            ("actor.weights", "ONLOAD", 0, 2.0, 2.5),
            ("actor.train", "TRAIN", 0, 3.0, 4.0),
        )
    ]
    timeline = Timeline(tuple(spans))
    assert predicted_seconds(timeline) == {
        "actor.generate": 3.0,
        "actor.onload": 0.5,
        "actor.train": 1.0,
        STEP: 4.0,
    }
    row = {"timing_s/actor.generate": 2.0, "timing_s/actor.train": 1.0, "timing_s/step": 5.0}
    found = forecast_beside(Plan("p", 2, predicted=timeline), [{**row, "timing_s/step": 99.0}, row])
    assert found == [
        Beside("actor.generate", 3.0, 2.0),
        Beside("actor.onload", 0.5, None),
        Beside("actor.train", 1.0, 1.0),
        Beside(STEP, 4.0, 5.0),
    ]
    assert [one.error for one in found] == pytest.approx([0.5, None, 0.0, -0.2])


@pytest.fixture
def profile(make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    return keep_made_up_profile(make_recipe())


@pytest.mark.usefixtures("profile")
def test_a_plan_is_found_of_several_devices_alone(make_recipe: MakeRecipe) -> None:
    """Which is the default. It is for the data's prompts, on this machine as it was measured."""
    alone = prepare(make_recipe(steps=1)).plan
    assert (alone.name, alone.num_ranks, alone.predicted) == ("colocated", 1, None)
    several = [prepare(make_recipe(devices=2, steps=1)).plan for _ in range(2)]
    assert several[0].num_ranks == 2
    assert several[0].name == "auto"
    assert several[0] == several[1]
    assert several[0].predicted is not None
    assert predicted_seconds(several[0].predicted)[STEP] > 10, "a layer takes seconds, as the profile says"


@pytest.mark.usefixtures("profile")
def test_how_many_groups_go_round_stages_is_decided_once_and_kept(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """A run that is resumed has the number that it began with, whatever was measured meanwhile."""
    stages = write_plan(tmp_path, "stages", {"actor.generate": "0,1 pp2", "actor.train": "0", "ref.logprobs": "0"})
    recipe = make_recipe(plan=str(stages), steps=1)
    begun = prepare(recipe).recipe
    assert recipe.sampling.decode_groups == "auto"
    assert begun.sampling.decode_groups == 2
    assert prepare(make_recipe(steps=1)).recipe.sampling.decode_groups == "auto", "without stages"
    kept = tmp_path / "kept.yaml"
    kept.write_text(recipe_text(begun.model_copy(update={"sampling": begun.sampling.model_copy(update=THREE)})))
    assert as_begun(kept, recipe).sampling.decode_groups == 3
    assert changed_keys(kept, recipe) == []
    assert as_begun(kept, begun).sampling.decode_groups == 2, "the user says so"


THREE = {"decode_groups": 3}


def test_what_no_profile_fits_is_measured_once(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And where that fails the run is planned by conservative numbers, and says why."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    asked: list[int] = []
    recipe = make_recipe()
    shape = ModelShape.from_config(read_config(recipe.model), recipe.model)

    def fails(one: Recipe, threads: int) -> str:
        asked.append(threads)
        return "no cores"

    def measures(one: Recipe, threads: int) -> str:
        asked.append(threads)
        keep_made_up_profile(one)
        return ""

    monkeypatch.setattr(machine, "_measure", fails)
    assert measured_machine(recipe, shape, 2)[1] == CONSERVATIVE
    assert "conservative numbers of this machine: no cores" in capsys.readouterr().err
    monkeypatch.setattr(machine, "_measure", measures)
    assert measured_machine(recipe, shape, 2)[1].exact
    assert measured_machine(recipe, shape, 2)[1].exact
    assert asked == [1, 1], "the second time it is kept"


@pytest.mark.slow
@pytest.mark.usefixtures("profile")
def test_a_run_on_a_plan_that_was_found_keeps_it_and_says_what_came_of_it(
    make_recipe: MakeRecipe, capfd: pytest.CaptureFixture[str]
) -> None:
    from plait.cli.report import print_outcome
    from plait.runtime.api import run

    recipe = make_recipe(plan="auto", devices=2, steps=2)
    outcome = run(recipe.model_copy(update={"steps": 1}))
    kept = Plan.load(recipe.run_dir / "plan.json")
    assert kept.predicted is not None
    changed = Plan(kept.name, kept.num_ranks, kept.placements, predicted=None)
    changed.save(recipe.run_dir / "plan.json")
    outcome = run(recipe, resume=True)
    assert outcome.step == 2
    assert Plan.load(recipe.run_dir / "plan.json") == changed, "the plan of the folder is kept"
    kept.save(recipe.run_dir / "plan.json")
    print_outcome(recipe, outcome)
    record = json.loads((recipe.run_dir / "forecast.json").read_text())
    rows = {one["call"]: one for one in record["calls"]}
    assert rows["actor.train"]["measured_s"] > 0
    assert rows["step"]["error"] is not None
    assert "predicted" in capfd.readouterr().out


def test_lengths(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    most = recipe.sampling.max_response_tokens
    assert lengths_of(None, recipe, lambda: Lengths.fixed(9)).responses.values == (most,)
    assert lengths_of("5:3", recipe, lambda: Lengths.fixed(9)).prompts.values == (5,)
    assert lengths_of("3~0.5", recipe, lambda: Lengths.fixed(9)).responses.longest <= most
    (tmp_path / "run/samples").mkdir(parents=True)
    row = {"prompt_ids": [1, 2], "token_ids": [3]}
    (tmp_path / "run/samples/step-000001.jsonl").write_text(json.dumps(row) + "\n")
    assert lengths_of(str(tmp_path / "run"), recipe, lambda: Lengths.fixed(9)).prompts.values == (2,)
    with pytest.raises(ConfigError, match="no samples"):
        lengths_of(str(tmp_path), recipe, lambda: Lengths.fixed(9))

"""A plan that is found before a run, its prediction beside what was measured."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plait.cost.corrections import Correction
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.machine import unmeasured
from plait.cost.profile import Profile
from plait.errors import ConfigError, DataError
from plait.models.files.hub import read_config
from plait.models.shape import ModelShape
from plait.policy.packing import GroupTokens
from plait.recipes.recipe import Recipe
from plait.runtime.folder.stored_recipe import as_begun, changed_keys, recipe_text
from plait.runtime.prediction import machine
from plait.runtime.prediction.forecast import STEP, Beside, Forecast, forecast_of, predicted_seconds
from plait.runtime.prediction.lengths import lengths_of
from plait.runtime.prediction.machine import measured_machine
from plait.runtime.prediction.planning import Planning
from plait.runtime.prediction.run_planning import planning_for_run, with_prediction
from plait.runtime.prepare import data_lengths, outline, prepare
from plait.schedule.plan import Plan
from plait.schedule.timeline import Span, Timeline
from tests.runs.plan_files import write_plan
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
    row = {"timing_s/actor.generate": 2.0, "timing_s/actor.train": 1.0, "timing_s/step": 5.0, "timing_s/score": 0.5}
    row |= {"perf/kind_s/DECODE": 2.0, "perf/kind_s/STEP": 0.25, "perf/peak_bytes/rank_0": 100}
    first = {**row, "timing_s/step": 99.0, "perf/peak_bytes/rank_0": 80}
    found = forecast_of(Plan("p", 2, predicted=timeline), "a profile", {0: 150, 1: 120}, [first, row])
    assert found.calls == [
        Beside("actor.generate", 3.0, 2.0),
        Beside("actor.onload", 0.5, None),
        Beside("actor.train", 1.0, 1.0),
        Beside("score", None, 0.5),
        Beside(STEP, 4.0, 5.0),
    ]
    assert [one.error for one in found.calls] == pytest.approx([0.5, None, 0.0, None, -0.2])
    assert found.kinds == [
        Beside("DECODE", 3.0, 2.0),
        Beside("ONLOAD", 0.5, None),
        Beside("TRAIN", 1.0, None),
        Beside("STEP", None, 0.25),
    ]
    assert found.memory == [Beside("0", 150, 100), Beside("1", 120, None)]
    assert (found.not_predicted, found.cold) == ([], False), "half a second of five is not more than a tenth"
    longer = {**row, "timing_s/score": 0.6}
    assert forecast_of(Plan("p", 2, predicted=timeline), "a profile", {}, [first, longer]).not_predicted == ["score"]
    assert forecast_of(Plan("p", 2, predicted=timeline), "a profile", {}, [first]).cold


def test_kinds_that_gpus_do_not_tell_apart_are_one() -> None:
    """2 s of forwards and backwards and 1 of a step are foretold; the step of 2.5 has waited for what is asked for in
    0.25."""
    parts = (("actor.train", "TRAIN", 0.0, 2.0), ("actor.train/b0/step", "STEP", 2.0, 3.0))
    spans = [Span(action, kind, 0, start, end, step=1) for action, kind, start, end in parts]
    row = {"timing_s/step": 3.0, "perf/kind_s/DECODE": 1.0, "perf/kind_s/TRAIN": 0.25, "perf/kind_s/STEP": 2.5}
    row |= {"perf/peak_bytes/rank_0": 100, "perf/device_peak_bytes/rank_0": 40}
    forecast = forecast_of(Plan("p", 1, predicted=Timeline(tuple(spans))), "a profile", {0: 50}, [row])
    assert forecast.kinds == [Beside("TRAIN and STEP", 3.0, 2.75), Beside("DECODE", None, 1.0)]


def test_what_was_not_predicted_is_measured_all_the_same(tmp_path: Path) -> None:
    """And comes back from its file; of a GPU its own memory counts."""
    row = {"timing_s/step": 5.0, "perf/peak_bytes/rank_0": 100, "perf/device_peak_bytes/rank_0": 40}
    found = forecast_of(Plan("p", 1), "a profile", {0: 50}, [row])
    assert found == Forecast("p", "a profile", [Beside(STEP, None, 5.0)], [], [Beside("0", 50, 40)], cold=True)
    assert found.not_predicted == []
    (tmp_path / "forecast.json").write_text(found.to_json())
    assert Forecast.load(tmp_path / "forecast.json") == found
    assert json.loads(found.to_json())["memory"] == [
        {"rank": 0, "predicted_bytes": 50, "measured_bytes": 40, "error": 0.25}
    ]


def test_what_was_carried_to_the_ranks_of_a_run_stands_in_its_forecast(tmp_path: Path) -> None:
    """By name of the kind: of which kind, by how many steps, and the factor."""
    carried = {"train on 2": Correction(1.2, "train on 1", 3, carried=True)}
    found = forecast_of(Plan("p", 2), "a profile", {}, [{"timing_s/step": 5.0}], carried)
    (tmp_path / "forecast.json").write_text(found.to_json())
    record = json.loads(found.to_json())
    assert record["carried"] == {"train on 2": {"of": "train on 1", "steps": 3, "factor": 1.2}}
    assert Forecast.load(tmp_path / "forecast.json") == found
    del record["carried"], record["cold"]
    (tmp_path / "forecast.json").write_text(json.dumps(record))
    before = Forecast.load(tmp_path / "forecast.json")
    assert (before.carried, before.cold) == ({}, False), "of a run before it was kept"


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
    assert changed_keys(kept, recipe) == {}
    assert as_begun(kept, begun).sampling.decode_groups == 2, "the user says so"


def test_a_run_that_was_begun_without_guesses_goes_on_without(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    """`off` was the default once, and stands in the recipes of runs of then; older ones have no such key."""
    kept, recipe = tmp_path / "recipe.yaml", make_recipe()
    assert recipe.sampling.speculation == "auto"
    kept.write_text(recipe_text(make_recipe(**{"sampling.speculation": "off"})))
    assert as_begun(kept, recipe).sampling.speculation == "off"
    assert changed_keys(kept, recipe) == {}
    assert list(changed_keys(kept, make_recipe(**{"sampling.speculation": 4}))) == ["sampling.speculation"]
    kept.write_text(recipe_text(recipe).replace("  speculation: auto\n", ""))
    assert as_begun(kept, recipe).sampling.speculation == "auto"
    assert changed_keys(kept, recipe) == {}


THREE = {"decode_groups": 3}


def test_what_no_profile_fits_is_measured_once(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And where that fails the run is planned by what its kind does, and says why."""
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
    assert measured_machine(recipe, shape, 2) == unmeasured("cpu", 2, 1)
    assert "was not measured (`plait profile` does): no cores" in capsys.readouterr().err
    monkeypatch.setattr(machine, "_measure", measures)
    assert measured_machine(recipe, shape, 2)[1].exact
    assert measured_machine(recipe, shape, 2)[1].exact
    assert asked == [1, 1], "the second time it is kept"


def test_nothing_is_measured_where_processes_have_no_room(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 of them: more than this machine has memory for."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    asked: list[object] = []
    monkeypatch.setattr(subprocess, "run", lambda *of_command, **_: asked.append(of_command))
    with pytest.raises(ConfigError, match=r"^`plan` auto: no plan on 4096 devices .* by itself; take fewer devices"):
        prepare(make_recipe(devices=4096))
    assert not asked


@pytest.mark.usefixtures("profile")
def test_a_run_on_one_device_ends_with_its_prediction_beside_what_it_measured(
    make_recipe: MakeRecipe, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of calls, of kinds of actions and of memory; a stay that follows keeps the prediction of the first."""
    from plait.cli.report import print_outcome
    from plait.runtime.api import run

    recipe = make_recipe(steps=2)
    run(recipe.model_copy(update={"steps": 1}))
    predicted = Plan.load(recipe.run_dir / "plan.json").predicted
    assert predicted is not None
    keep_made_up_profile(recipe, layer_s=7.0)
    outcome = run(recipe, resume=True)
    assert Plan.load(recipe.run_dir / "plan.json").predicted == predicted, "not by the profile that is kept now"
    record = json.loads((recipe.run_dir / "forecast.json").read_text())
    calls = {one["call"]: one for one in record["calls"]}
    assert calls["step"]["predicted_s"] > 10 > calls["step"]["measured_s"] > 0
    assert calls["actor.train"]["error"] > 0
    assert calls["reward.score"]["predicted_s"] is None
    kinds = {one["kind"]: one for one in record["kinds"]}
    assert all(kinds[kind]["error"] is not None for kind in ("DECODE", "SCORE", "TRAIN", "STEP"))
    (memory,) = record["memory"]
    assert memory["rank"] == 0
    assert memory["predicted_bytes"] > 500 << 20
    assert memory["measured_bytes"] > 100 << 20
    print_outcome(recipe, outcome)
    printed = capfd.readouterr().out
    assert all(words in printed for words in ("predicted", "all STEP", "memory of rank 0, at most"))


@pytest.mark.usefixtures("profile")
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto"])
def test_what_generates_nothing_is_predicted_by_the_samples_that_are_given(
    make_recipe: MakeRecipe, tmp_path: Path, algorithm: str
) -> None:
    rows = {"sft": {"prompt": "1 plus 2?", "completion": "3"}, "dpo": {"prompt": "1?", "chosen": "1", "rejected": "22"}}
    rows["kto"] = rows["sft"] | {"label": True}
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(rows[algorithm]) + "\n" for _ in range(12)))
    nothing = {"reward.functions": [], "sampling": {}, "options": {}, "samples_per_prompt": 8}
    recipe = make_recipe(algorithm=algorithm, **nothing, **{"data.source": str(tmp_path / "given.jsonl")})
    prepared = prepare(recipe)
    assert set(prepared.lengths.responses.values) == {"sft": {2}, "dpo": {2, 3}, "kto": {2}}[algorithm]
    predicted = with_prediction(prepared).predicted
    assert predicted is not None
    assert "actor.train" in predicted_seconds(predicted)
    outlined = outline(recipe)
    there = data_lengths(outlined)
    assert there == prepared.lengths, "what `plait plan` reads"
    assert lengths_of(None, outlined, lambda: there) is there
    planning = planning_for_run(outlined, there)
    assert predicted_seconds(planning.predict(prepared.plan).timeline) == predicted_seconds(predicted)


def test_a_run_that_nothing_can_be_predicted_of_goes_on(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ConfigError("no idea")

    prepared = prepare(make_recipe())
    monkeypatch.setattr(Planning, "predict", fails)
    assert with_prediction(prepared) == prepared.plan
    assert capsys.readouterr().err == "nothing is predicted of this run: ConfigError: no idea\n"


@pytest.mark.slow
@pytest.mark.usefixtures("profile")
def test_a_run_on_a_plan_that_was_found_keeps_it(make_recipe: MakeRecipe) -> None:
    from plait.runtime.api import run

    recipe = make_recipe(plan="auto", devices=2, steps=2)
    run(recipe.model_copy(update={"steps": 1}))
    kept = Plan.load(recipe.run_dir / "plan.json")
    assert kept.predicted is not None
    changed = Plan(kept.name, kept.num_ranks, kept.placements, predicted=kept.predicted)
    changed.save(recipe.run_dir / "plan.json")
    assert run(recipe, resume=True).step == 2
    assert Plan.load(recipe.run_dir / "plan.json") == changed, "the plan of the folder is kept"
    memory = json.loads((recipe.run_dir / "forecast.json").read_text())["memory"]
    assert [one["rank"] for one in memory if one["measured_bytes"] > 0] == [0, 1]


def test_lengths(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    run = outline(recipe)
    most = recipe.sampling.max_response_tokens
    nine = SampleLengths(Lengths.fixed(9), Lengths.fixed(most))
    assert lengths_of(None, run, lambda: nine) is nine
    assert lengths_of("5:3", run, lambda: nine).prompts.values == (5,)
    assert lengths_of("3", run, lambda: nine).prompts.values == (9,)
    assert lengths_of("3~0.5", run, lambda: nine).responses.longest <= most
    with pytest.raises(ConfigError, match=f"{most + 1} tokens are more than `sampling.max_response_tokens`"):
        lengths_of(str(most + 1), run, lambda: nine)
    room = run.shapes[recipe.model].max_positions - most
    assert lengths_of(f"{room}:3", run, lambda: nine).prompts.values == (room,)
    with pytest.raises(ConfigError, match=f"a prompt of {room + 1} tokens is longer than the {room} that"):
        lengths_of(f"{room + 1}:3", run, lambda: nine)
    (tmp_path / "run/samples").mkdir(parents=True)
    row = {"prompt_ids": [1, 2], "token_ids": [3]}
    (tmp_path / "run/samples/step-000001.jsonl").write_text(json.dumps(row) + "\n")
    assert lengths_of(str(tmp_path / "run"), run, lambda: nine).prompts.values == (2,)
    rows = [{"prompt_ids": [*range(40), last], "token_ids": [3]} for last in (1, 2)]
    (tmp_path / "run/samples/step-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert lengths_of(str(tmp_path / "run"), run, lambda: nine).prompts == Lengths((41, 41), 40)
    with pytest.raises(ConfigError, match="no samples"):
        lengths_of(str(tmp_path), run, lambda: nine)
    (tmp_path / "run/samples/step-000001.jsonl").write_text('{"prompt_ids": 5, "token_ids": [3]}\n')
    with pytest.raises(DataError, match=r"step-000001\.jsonl:1 is damaged: expected a list of tokens as `prompt_ids`"):
        lengths_of(str(tmp_path / "run"), run, lambda: nine)


def test_lengths_that_are_stated_of_given_texts(make_recipe: MakeRecipe) -> None:
    """What generation may draw bounds none of them."""
    nothing = {
        "reward.functions": [],
        "sampling": {},
        "options": {},
        "samples_per_prompt": 8,
        "data.max_example_tokens": 200,
    }
    run = outline(make_recipe(algorithm="sft", **nothing))
    assert run.lengths.groups == (GroupTokens(1, (199,)),)
    assert lengths_of("5:150", run, lambda: run.lengths).longest == 155
    with pytest.raises(
        ConfigError, match=r"200 tokens are more than `data\.max_example_tokens` of the recipe less one"
    ):
        lengths_of("200", run, lambda: run.lengths)
    with pytest.raises(ConfigError, match="51:150 are 201 tokens, more than the 200 that an example may have"):
        lengths_of("51:150", run, lambda: run.lengths)
    away = replace(run, recipe=run.recipe.model_copy(update={"model": "llama-2-7b"}))
    with pytest.raises(ConfigError, match=r"'llama-2-7b' has no tokenizer .* give PROMPT: before it \(128:150\)"):
        lengths_of("150", away, lambda: run.lengths)

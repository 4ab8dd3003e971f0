"""What a run measured, held against what its profile says: by hand, and of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from plait.cost.calibration import calibrated
from plait.cost.kept_profiles import kept_profiles, profile_path
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.profile import DraftRecord, KindRecord
from plait.file_lock import alone_at
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prediction import refinement
from plait.runtime.prediction.draft_forecast import drafts_of
from plait.runtime.prediction.forecast import STEP, read_forecast
from plait.runtime.prediction.planning import Planning
from plait.runtime.prediction.refinement import run_record, steady_rows
from tests.runs.profiles import keep_made_up_profile

MakeRecipe = Callable[..., Recipe]


def test_a_record_by_hand() -> None:
    """Two calls that score: 1 + 2 s by the profile, 2 + 4 s predicted, 3 + 3 s measured. Moves were not run."""
    kinds = {"a.score": "score", "b.score": "score", "a.weights": "move"}
    profile = {"a.score": 1.0, "b.score": 2.0, "a.weights": 1.0, "step": 4.0}
    predicted = {"a.score": 2.0, "b.score": 4.0, "a.weights": 1.0, "step": 8.0}
    rows = [
        {"timing_s/a.score": 3.0, "timing_s/b.score": 3.0, "timing_s/step": seconds, "timing_s/c.train": 9.0}
        for seconds in (9.0, 10.0, 12.0)
    ]
    found = run_record(2, kinds, profile, predicted, rows)
    assert found is not None
    assert (found.devices, found.predicted_s, found.measured_s) == (2, 8.0, 10.0)
    assert found.kinds == {"score": KindRecord(profile_s=3.0, predicted_s=6.0, measured_s=6.0)}
    assert found.error == pytest.approx(0.2)
    assert found.errors == {"score": 0.0}


def test_what_drafts_came_to_by_hand() -> None:
    """Half of the steps computed drafts: 1.5 tokens a sample of 2 rows more, as 40 drafts of which 10 were accepted
    gained 10 tokens to 20 samples. So a step is 1.25 tokens of 2 rows in the mean."""
    spec = {"mean_acceptance_length": 1.5, "drafted_steps": 0.5, "draft_tokens": 40, "accepted_tokens": 10}
    found = drafts_of([{f"perf/spec/{name}": value for name, value in spec.items()}] * 3)
    assert found == DraftRecord(tokens=1.25, rows=2.0)
    by_model = {f"perf/spec/{name}": value for name, value in (spec | {"draft_model_passes": 1.5}).items()}
    assert drafts_of([by_model] * 3) == DraftRecord(tokens=1.25, rows=2.0, passes=1.5)
    assert drafts_of([{"timing_s/step": 1.0}]) is None


def test_nothing_is_known_of_steps_that_were_not_measured() -> None:
    assert run_record(1, {}, {"step": 1.0}, {"step": 1.0}, [{}]) is None


def test_the_first_steps_of_each_stay_are_left_out() -> None:
    """Three stays, of four steps, one and two."""
    steps = [{"step": number} for number in range(1, 8)]
    assert [row["step"] for row in steady_rows(steps, [0, 4, 5])] == [2, 3, 4, 7]
    assert [row["step"] for row in steady_rows(steps, [4, 5])] == [7]
    assert [row["step"] for row in steady_rows(steps, [7])] == []


def test_a_run_corrects_the_profile_of_its_machine(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    recipe = make_recipe(steps=3)
    profile = keep_made_up_profile(recipe)
    run(recipe)
    (kept,) = kept_profiles(profile.machine, "cpu")
    (record,) = kept.runs
    assert record.devices == 1
    assert set(record.kinds) == {"decode on 1", "score on 1", "train on 1"}
    for one in record.kinds.values():
        assert one.predicted_s == one.profile_s > one.measured_s > 0, "a layer of a tiny model takes no second"
    found = calibrated([kept], profile.shape, "float32", 1, 1)
    assert (found.error, found.runs) == (record.error, 1)
    run(recipe.model_copy(update={"run_dir": tmp_path / "again"}))
    (kept,) = kept_profiles(profile.machine, "cpu")
    again = kept.runs[1]
    assert again.kinds["train on 1"].predicted_s == pytest.approx(record.kinds["train on 1"].measured_s, rel=1e-3)
    assert again.error < record.error
    other = make_recipe(steps=3, dtype="float64", run_dir=str(tmp_path / "other"))
    run(other)
    assert len(kept_profiles(profile.machine, "cpu")[0].runs) == 2, "no profile is of its dtype"
    (tmp_path / "tools.py").write_text("def reply(messages):\n    return 'go on'\n")
    keys = {"turns.reply": f"{tmp_path}/tools.py:reply", "turns.max_turns": 2}
    run(conversing := make_recipe(steps=3, **keys, run_dir=str(tmp_path / "conversing")))
    assert len(kept_profiles(profile.machine, "cpu")[0].runs) == 2, "rounds of turns are not what was predicted"
    forecast = read_forecast(conversing.run_dir)
    assert forecast is not None
    assert forecast.source.endswith("neither rounds of turns nor the seconds of `turns.reply` are predicted")
    options = {"options.dynamic_sampling": True, "run_dir": str(tmp_path / "drawn again")}
    run(drawing := make_recipe(steps=3, **options))
    assert len(kept_profiles(profile.machine, "cpu")[0].runs) == 2, "one draw was predicted, however many there were"
    forecast = read_forecast(drawing.run_dir)
    assert forecast is not None
    assert forecast.source.endswith("further ones of actor.generate, 9 at most, are not predicted")


def test_a_run_that_goes_on_is_measured_by_the_steps_of_its_plan_and_no_step_corrects_a_profile_twice(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps on two devices, then two and three on one, and at last none. The first of each stay's is left out of
    the profile, as any run's is; what the folder says is of all three stays on one device. Predicted is what the
    responses of the steps that count take."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    predicted: list[SampleLengths] = []

    def planning(*of: Any) -> Planning:
        predicted.append(of[5])
        return Planning(*of)

    monkeypatch.setattr(refinement, "Planning", planning)
    recipe = make_recipe()
    profile = keep_made_up_profile(recipe)
    run(make_recipe(steps=2, devices=2, plan="split"))
    for steps, counted in ((4, 1), (7, 2), (7, 0)):
        records = kept_profiles(profile.machine, "cpu")[0].runs
        run(make_recipe(steps=steps), resume=True)
        rows = read_rows(recipe.run_dir / "metrics.jsonl")
        forecast = read_forecast(recipe.run_dir)
        assert forecast is not None
        assert [one.name for one in forecast.memory] == ["0"]
        assert {one.name: one.measured for one in forecast.calls}[STEP] == median(
            row["timing_s/step"] for row in rows[3:]
        )
        (kept,) = kept_profiles(profile.machine, "cpu")
        assert kept.runs[: len(records)] == records
        assert [(run.devices, run.steps) for run in kept.runs[len(records) :]] == [(1, counted)] * (counted > 0)
        if counted:
            assert kept.runs[-1].measured_s == median(row["timing_s/step"] for row in rows[-counted:])
            files = [recipe.run_dir / f"samples/step-{row['step']:06d}.jsonl" for row in rows[-counted:]]
            said = sorted(len(row["token_ids"]) for file in files for row in read_rows(file))
            assert predicted[-1].responses == Lengths.recorded(said)


def test_a_run_on_given_texts_corrects_it_by_these(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder has no samples: the texts are those of the data."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "given.jsonl"
    rows.write_text("".join(json.dumps({"prompt": "1 plus 2?", "completion": "3"}) + "\n" for _ in range(12)))
    nothing = {"reward.functions": [], "sampling": {}, "options": {}, "samples_per_prompt": 8}
    recipe = make_recipe(algorithm="sft", steps=3, **nothing, **{"data.source": str(rows)})
    profile = keep_made_up_profile(recipe)
    run(recipe)
    ((record,),) = (kept.runs for kept in kept_profiles(profile.machine, "cpu"))
    assert set(record.kinds) == {"train on 1"}
    assert record.predicted_s > record.measured_s > 0


@pytest.mark.slow
def test_a_run_does_not_wait_without_an_end_for_who_writes_the_profile(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(refinement, "LOCK_S", 0.1)
    recipe = make_recipe(steps=2)
    profile = keep_made_up_profile(recipe)
    lock = profile_path(profile).with_suffix(".lock")
    with alone_at(lock, 0):
        run(recipe)
    assert f"does not correct the profile of its machine: process {os.getpid()} on" in capsys.readouterr().err
    (kept,) = kept_profiles(profile.machine, "cpu")
    assert not kept.runs

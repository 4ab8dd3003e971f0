"""`plait trace diff` of a prediction and its run, as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.folder.history import History, Origin
from plait.schedule.plan import Placement, Plan
from plait.schedule.timeline import Span, Timeline, write_chrome_trace
from tests.cli.printed import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Training of 2 s was predicted, optimizer steps of 0.5 s in it; steps of the run took 3 and 4 s, 1 s of each the
    optimizer's, and its own functions 0.5."""
    predicted = (
        Span("actor.train", "TRAIN", 0, 0.0, 1.5, step=1),
        Span("actor.train/step", "STEP", 0, 1.5, 2.0, step=1),
    )
    measured = (
        Span("actor.train/b0/mb0", "TRAIN", 0, 0.0, 2.0, step=1),
        Span("actor.train/b0/step", "STEP", 0, 2.0, 3.0, step=1),
        Span("actor.train/b0/mb0", "TRAIN", 0, 5.0, 7.5, step=2),
        Span("advantages", "COMPUTE", 0, 7.5, 8.0, step=2),
        Span("actor.train/b0/step", "STEP", 0, 8.0, 9.0, step=2),
    )
    Plan("one", 1, predicted=Timeline(predicted)).save(tmp_path / "plan.json")
    write_chrome_trace(tmp_path / "trace.json", Timeline(measured, source="measured"))
    return tmp_path


def test_a_plan_and_the_folder_of_its_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "trace", "diff", folder / "plan.json", folder)
    rows = [line.split() for line in out.splitlines() if line]
    assert code == 0
    assert ["step", "2", "3.5", "+75.0%"] in rows
    assert ["actor.train", "(rank", "0)", "2", "3.25", "+62.5%"] in rows
    assert ["all", "STEP", "0.5", "1", "+100.0%"] in rows
    assert "only in b: advantages (rank 0), all COMPUTE" in out
    assert "only in a" not in out


def test_either_side_and_one_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "trace", "diff", folder, folder / "plan.json", "--step", 2, "--json")
    record = json.loads(out)
    assert (code, record["whole"], record["same_calls"]) == (0, "b", True)
    assert record["calls"][0] == {"name": "actor.train", "rank": 0, "seconds_a": 3.5, "seconds_b": 2.0}
    code, out, _ = run(capsys, "trace", "diff", folder, folder)
    assert (code, "the same actions in the same order" in out) == (0, True)


def test_of_a_run_that_changed_its_plan_the_steps_by_the_one_that_is_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Plan.load(folder / "plan.json")
    first.save(folder / "first.json")
    second = replace(first, placements=(Placement("actor.train", "train", (0,)),))
    second.save(folder / "plan.json")
    recipe = Recipe.model_validate({"model": "m", "data": {"source": "d"}})
    for plan, from_step in ((first, 0), (second, 1)):
        History(folder, resume=True).begin(Origin.here(), recipe, plan, from_step, print)
    capsys.readouterr()
    for plan, step_s in (("first.json", "3"), ("plan.json", "4")):
        code, out, _ = run(capsys, "trace", "diff", folder / plan, folder)
        assert code == 0
        assert ["step", "2", step_s] in [line.split()[:3] for line in out.splitlines()]
        assert ("only in b: advantages" in out) is (plan == "plan.json")
        _, out, _ = run(capsys, "trace", "diff", folder, folder / plan)
        assert ["step", step_s, "2"] in [line.split()[:3] for line in out.splitlines()]


def test_what_was_predicted_elsewhere_ends_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spans = tuple(Span("actor.train", "TRAIN", rank, 0.0, 1.0, step=1) for rank in (0, 1))
    Timeline(spans).save(folder / "two.json")
    code, out, _ = run(capsys, "trace", "diff", folder / "two.json", folder)
    assert (code, "only in a: actor.train (rank 1)" in out) == (1, True)


def test_what_has_no_timeline_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Plan("one", 1).save(folder / "plan.json")
    code, _, err = run(capsys, "trace", "diff", folder / "plan.json", folder)
    assert (code, "this plan has no predicted timeline" in err) == (2, True)
    (tmp_path / "empty").mkdir()
    code, _, err = run(capsys, "trace", "show", tmp_path / "empty")
    assert (code, "expected the trace of a run" in err) == (2, True)

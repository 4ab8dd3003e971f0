"""Samples to which nobody could reply (`turns.on_error: drop`): they end there, train nothing, and are told of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import RunError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.runs.placed_runs import where
from tests.runs.plans import assert_equal_columns, assert_equal_runs
from tests.runs.test_partial_rollout import check, replayed
from tests.runs.test_resume import kill_in_step, result_of
from tests.runs.test_turns import PLACES, keys_of
from tests.runs.test_turns_ahead import ahead
from tests.runs.written import logged, samples_of

MakeRecipe = Callable[..., Recipe]

FAULTY = """
import time
from tools import reply

def faulty(messages, **columns):
    said = messages[-1]["content"]
    if len(said) % 5 == 1:
        raise KeyError(said)
    return reply(messages, **columns)

def late(messages, **columns):
    if len(messages[-1]["content"]) % 5 == 1:
        time.sleep(60)
    return reply(messages, **columns)

def whole(turns, log_extra, **columns):
    last = [said[-1]["content"] for said in turns]
    log_extra("last", last)
    return [float(len(text)) for text in last]
"""


def dropping(folder: Path, function: str = "faulty", **keys: Any) -> dict[str, Any]:
    (folder / "faulty.py").write_text(FAULTY)
    replies = {"turns.reply": f"{folder}/faulty.py:{function}", "turns.on_error": "drop"}
    return keys_of(folder) | keys | replies


def test_who_is_left_out_and_what_is_told(
    make_recipe: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the same after a resume."""
    keys = dropping(tmp_path, steps=3, **{"evaluation.items": 3, "checkpoint.every": 1})
    keys |= {"reward.functions": [f"{tmp_path}/faulty.py:whole"]}
    whole, killed = (make_recipe(**keys, run_dir=str(tmp_path / name)) for name in ("whole", "killed"))
    run(whole)
    said = capsys.readouterr().err
    rows = samples_of(whole, 1)
    failed = [row for row in rows if "reply_error" in row]
    assert 0 < len(failed) < len(rows)
    for row in rows:
        last = row.get("turns", [{"content": row["response"]}])[-1]["content"]
        if row in failed:
            assert row["finish_reason"] == "aborted"
            assert row["reply_error"].startswith(f"raised KeyError: {last!r}\n")
            assert "line 8, in faulty" in row["reply_error"]
            assert row["rewards/whole"] is row["last"] is None, "nobody is asked about it"
            assert "advantages" not in row
        else:
            assert row["rewards/whole"] == len(row["last"])
            assert "advantages" in row
    assert f"reply `faulty` failed on sample {failed[0]['uid']}, turn " in said
    assert " of the evaluation, turn 2: raised KeyError" in said
    metrics = logged(whole)[0]
    assert metrics["turns/errors"] == len(failed) / len(rows)
    assert metrics["reward/dropped"] == 0
    assert metrics["rewards/whole/mean"] == pytest.approx(
        sum(row["rewards/whole"] or 0 for row in rows) / (len(rows) - len(failed))
    )
    assert "reply_failed" in {row.get("rule") for row in read_rows(whole.run_dir / "doctor.jsonl")}
    items = read_rows(whole.run_dir / "samples/eval-000000.jsonl")
    assert [row["reward"] == "NaN" for row in items] == ["reply_error" in row for row in items]
    assert read_rows(whole.run_dir / "evaluations.jsonl")[0]["eval/dropped"] == sum("reply_error" in i for i in items)
    kill_in_step(killed, 1)
    run(killed, resume=True)
    assert result_of(killed.run_dir) == result_of(whole.run_dir)


@pytest.mark.slow
def test_a_reply_that_is_late_or_kills_its_process_ends_its_sample_alone(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    keys = dropping(tmp_path, "late", steps=1, **{"turns.timeout_s": 0.4, "turns.workers": 2})
    run(recipe := make_recipe(**keys))
    errors = [row["reply_error"].splitlines() for row in samples_of(recipe, 1) if "reply_error" in row]
    assert errors
    for message, *frames in errors:
        assert message == "passed the time limit of 0.4 s (`turns.timeout_s`) and was killed at:"
        assert "in late" in frames[1]


DYNAMIC = {"dynamic_sampling": True, "max_sampling_rounds": 3}


@pytest.mark.parametrize("options", slow_but([{}], [{}, DYNAMIC]), ids=str)
def test_where_every_reply_fails_the_run_ends(make_recipe: MakeRecipe, tmp_path: Path, options: dict[str, Any]) -> None:
    keys = dropping(tmp_path, options=options) | {"turns.reply": f"{tmp_path}/tools.py:broken"}
    with pytest.raises(RunError, match=r"step 1: (`turns\.reply` failed on each sample|.* kept none)"):
        run(make_recipe(**keys))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["turns-mixed-2", "turns-model-split-2", "turns-tp2pp2"])
def test_a_plan_changes_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    """Scores of models may be those of parts, which have the samples that are left out later."""
    (flow, keys), plan = PLACES[name]
    keys = dropping(place, **keys) | {"sampling.max_response_tokens": 60}
    recipe = placed(flow, f"errors-{name}", **keys, **where(place, f"errors-{name}", plan))
    run(recipe)
    assert 0 < logged(recipe)[0]["turns/errors"] < 1
    one = reference(flow, **keys)
    assert_equal_runs(recipe.run_dir, one)
    assert_equal_columns(recipe.run_dir, one)


@pytest.mark.slow
@pytest.mark.parametrize("partial_rollout", ["off", "keep", "recompute"])
def test_drawn_ahead(make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str) -> None:
    """A checkpoint has samples that ended so, and the run that goes on from it the same result."""
    keys = dropping(tmp_path, **ahead(tmp_path, partial_rollout, steps=4, max_staleness=2), **{"checkpoint.every": 1})
    whole, killed = (make_recipe(**keys, run_dir=str(tmp_path / name)) for name in ("whole", "killed"))
    run(whole)
    assert all(0 < row["turns/errors"] < 1 for row in logged(whole))
    if partial_rollout == "off":
        kill_in_step(killed, 1)
        run(killed, resume=True)
        assert result_of(killed.run_dir) == result_of(whole.run_dir)
    else:
        assert result_of(replayed(whole, "again")) == result_of(whole.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("rest", ["2", "9"], ids=["another fails", "well again"])
@pytest.mark.parametrize("partial_rollout", ["keep", "recompute"])
def test_after_a_resume_other_replies_may_fail(
    make_recipe: MakeRecipe, tmp_path: Path, partial_rollout: str, rest: str
) -> None:
    """What was recorded of where samples stood may not hold then."""
    recipe = make_recipe(**dropping(tmp_path, **ahead(tmp_path, partial_rollout, steps=5, max_staleness=2)))
    kill_in_step(recipe, 3)
    tools = tmp_path / "faulty.py"
    tools.write_text(tools.read_text().replace("% 5 == 1", f"% 5 == {rest}"))
    assert run(recipe, resume=True).finished
    check(recipe.run_dir, 2)
    check(replayed(recipe, "again"), 2)  # its first steps were made with the other tool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "options"), [("grpo", DYNAMIC), ("remax", {}), ("rloo", {}), ("reinforce_pp", {}), ("ppo", {})]
)
def test_every_algorithm_that_samples(
    make_recipe: MakeRecipe, tmp_path: Path, algorithm: str, options: dict[str, Any]
) -> None:
    run(recipe := make_recipe(**dropping(tmp_path, algorithm=algorithm, options=options)))
    assert any(row["turns/errors"] > 0 for row in logged(recipe))

"""Samples that end in other instances than they began in, and scoring on the ranks that they leave: nothing of what is
computed changes. float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.schedule.timeline import load_any
from tests.cases import slow_but
from tests.runs.paced_flow import paced
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_columns, assert_equal_runs

KEYS: dict[str, Any] = {
    "dtype": "float64",
    "steps": 2,
    "prompts_per_step": 6,
    "sampling.max_response_tokens": 40,
    "sampling.stop_token_ids": [*range(3, 300, 12)],  # responses of many lengths
    "micro_batch_tokens": 128,
}
PARTS_PAY = {"step_s": 1.0, "more_s": 0.5, "token_s": 0.05, "parts_s": 0.0, "prompt_tokens": 8.0}
"""Settings of a plan by which an instance that ends sooner should score."""
DP2 = {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"}
PLANS = {
    "dp2": DP2,
    "leader last": {**DP2, "actor.generate": "1,0 dp2"},
    "scores on one": {**DP2, "ref.logprobs": "1"},
    "dp2 tp2": {
        "actor.generate": "0,1,2,3 dp2 tp2",
        "actor.train": "0,1,2,3 dp2 tp2",
        "ref.logprobs": "0,1,2,3 dp2 pp2",
    },
    "offloaded": {**DP2, "ref.logprobs": "0,1 dp2 after=offload"},
    "all offloaded": dict.fromkeys(DP2, "0,1 dp2 after=offload"),
    "mixed": {
        "actor.generate": "0 | 1 | 2,3 tp2",
        "actor.train": "0,1,2,3 dp4",
        "ref.logprobs": "0,1,2,3 dp2 tp2",
    },
}


@pytest.mark.parametrize("share", [0, 1.5, -1, float("nan"), "often", None])
def test_what_fusion_may_not_be(make_recipe: Callable[..., Recipe], share: Any) -> None:
    with pytest.raises(ConfigError, match="key `fusion`: expected auto, off, or a share above 0 and at most 1, found "):
        make_recipe(fusion=share)


def test_fusion_is_a_share_or_off(make_recipe: Callable[..., Recipe]) -> None:
    assert [make_recipe(fusion=share).fusion for share in ("off", "0.5", 1, 0.25)] == ["off", 0.5, 1.0, 0.25]
    assert make_recipe().fusion == "auto"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2", "offloaded"])
def test_auto_decides_by_what_steps_took_and_repeats_it(
    make_recipe: Callable[..., Recipe], tmp_path: Path, name: str
) -> None:
    """The decisions of the steps stand in the run's folder: the first has no parts, as no lengths are known, the others
    do by what the plan says that things take. Without the plan's word nothing is gathered. A run that finds decisions
    of its steps does what they say: here samples of the third step are gathered when twelve are left, the bulk ahead,
    also on ranks that do one thing after the other, as a model leaves them."""
    keys = KEYS | {"steps": 4, "checkpoint.every": 2}
    one = make_recipe(**keys, run_dir=str(tmp_path / "one"))
    run(one)
    plan = write_plan(tmp_path, "plan", PLANS[name])
    lets = write_plan(tmp_path, "lets", PLANS[name], policies={"fusion": PARTS_PAY})
    auto = make_recipe(**keys, run_dir=str(tmp_path / "auto"), plan=str(lets))
    run(auto)
    assert_equal_runs(auto.run_dir, one.run_dir)
    decided = read_rows(auto.run_dir / "fusion.jsonl")
    assert [row["step"] for row in decided] == [1, 2, 3, 4]
    assert decided[0]["why"] == "no step was done yet"
    assert all(row["seen"]["score_s"] > 0 and row["seen"]["fixed_s"] >= 0 for row in decided[1:])
    assert all((row["moved"] > 0) <= (row["gain_s"] >= row["needed_s"] > 0) for row in decided)
    of_third = {"steps": 2, "algorithm": paced(tmp_path, (3,))}
    again = make_recipe(**(keys | of_third), run_dir=str(tmp_path / "again"), plan=str(lets))
    run(again)
    asked = decided[2] | {"moved_at": 12, "moved": 3, "ahead": True}
    with open(again.run_dir / "fusion.jsonl", "a") as file:
        file.write(json.dumps(asked) + "\n" + '{"step": 4, "torn')
    run(again.model_copy(update={"steps": 4}), resume=True)
    repeated = read_rows(again.run_dir / "fusion.jsonl")
    assert [row["step"] for row in repeated] == [1, 2, 3, 4]
    assert repeated[2] == asked
    assert read_rows(again.run_dir / "metrics.jsonl")[2]["perf/samples_moved"] > 0
    assert_equal_runs(again.run_dir, one.run_dir)
    plain = make_recipe(**keys, run_dir=str(tmp_path / "plain"), plan=str(plan))
    run(plain)
    assert not (plain.run_dir / "fusion.jsonl").exists()
    assert_equal_runs(plain.run_dir, one.run_dir)


@pytest.mark.parametrize("share", slow_but([0.25], [0.25, 1.0]))
@pytest.mark.parametrize("name", slow_but(["dp2"], PLANS))
def test_fusion_changes_nothing(make_recipe: Callable[..., Recipe], tmp_path: Path, name: str, share: float) -> None:
    one = make_recipe(**KEYS, run_dir=str(tmp_path / "one"))
    run(one)
    plan = str(write_plan(tmp_path, "plan", PLANS[name]))
    keys = KEYS | {"algorithm": paced(tmp_path, (1, 2))}
    fused = make_recipe(**keys, run_dir=str(tmp_path / "fused"), plan=plan, fusion=share)
    run(fused)
    assert_equal_runs(fused.run_dir, one.run_dir)
    assert_equal_columns(fused.run_dir, one.run_dir)
    rows = read_rows(fused.run_dir / "metrics.jsonl")
    assert all(row["perf/samples_moved"] > 0 for row in rows)
    for file in (fused.run_dir / "samples").glob("step-*.jsonl"):
        assert len({row["policy_version"] for row in read_rows(file)}) == 1
    spans = [span for span in load_any(fused.run_dir / "trace.json").spans if span.step == 2]
    trained = [span for span in spans if span.action.startswith("actor.train/")]
    scored = [span for span in spans if span.action.startswith("ref.logprobs/")]
    generated = [span for span in spans if span.action.startswith("actor.generate/")]
    assert min(s.start_s for s in trained) >= max(s.end_s for s in (*scored, *generated)), "of all samples"
    if name != "scores on one":  # the rank that scores may be the one that generates to the end
        assert min(s.start_s for s in scored) < max(s.end_s for s in generated), "while others still generated"
    if "after=offload" in PLANS[name]["ref.logprobs"]:
        loaded = [span for span in spans if (span.kind, span.role) == ("ONLOAD", "ref")]
        assert min(s.end_s for s in loaded) < max(s.end_s for s in generated), "it is back before that"


THREE = {"actor.generate": "0 | 1,2 tp2", "actor.train": "0,1,2 dp3", "ref.logprobs": "0,1,2 dp3"}


@pytest.mark.parametrize("fusion", slow_but(["auto"], [0.25, "auto"]))
@pytest.mark.parametrize(("name", "most"), slow_but([("dp2", 1)], [("dp2", 1), ("dp2", 2), ("three", 1)]))
def test_batches_that_are_drawn_ahead_are_scored_as_they_end(
    make_recipe: Callable[..., Recipe], tmp_path: Path, name: str, most: int, fusion: float | str
) -> None:
    """A reference scores a batch in the step that draws it, on ranks that have none of its samples left. With auto it
    does so in parts where lengths of a step before are known when the batch is drawn: only for the last."""
    keys = KEYS | {"steps": 2 + most, "max_staleness": most}
    one = make_recipe(**keys, run_dir=str(tmp_path / "one"))
    run(one)
    plan = write_plan(tmp_path, "plan", (PLANS | {"three": THREE})[name], policies={"fusion": PARTS_PAY})
    how = {"fusion": fusion, "plan": str(plan)}
    if fusion != "auto":
        how["algorithm"] = paced(tmp_path, (1, 2))
    fused = make_recipe(**(keys | how), run_dir=str(tmp_path / "fused"))
    run(fused)
    assert_equal_runs(fused.run_dir, one.run_dir)
    assert_equal_columns(fused.run_dir, one.run_dir)
    spans = load_any(fused.run_dir / "trace.json").spans
    parts = {span.step for span in spans if span.action.startswith("ref.logprobs/p1/")}
    assert parts == ({2 + most} if fusion == "auto" else {*range(1, 3 + most)})
    if fusion != "auto":
        assert all(row["perf/samples_moved"] > 0 for row in read_rows(fused.run_dir / "metrics.jsonl"))
        of = lambda call, step: [span for span in spans if span.step == step and span.action.startswith(f"{call}/")]
        begins = {step: min(span.start_s for span in of("ref.logprobs", step)) for step in parts}
        ends = {step: max(span.end_s for span in of("actor.generate", step)) for step in parts}
        # Not in each: on a busy machine a rank may get to it when the last samples, of milliseconds, are through.
        assert any(begins[step] < ends[step] for step in parts), "while others still generated"


def test_what_has_all_samples_from_the_beginning_of_its_step_scores_them_at_once(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """A critic scores a batch in its own step, as its weights change: in parts it would only take longer. The reference
    scores parts in the step that draws."""
    keys = KEYS | {"steps": 2, "max_staleness": 1, "algorithm": "ppo", "options": {"kl_coef": 0.05}}
    one = make_recipe(**keys, run_dir=str(tmp_path / "one"))
    run(one)
    placed = DP2 | {"critic.train": "0,1 dp2", "critic.values": "0,1 dp2"}
    plan = str(write_plan(tmp_path, "plan", placed, policies={"fusion": PARTS_PAY}))
    fused = make_recipe(**keys, fusion=0.25, plan=plan, run_dir=str(tmp_path / "fused"))
    run(fused)
    assert_equal_runs(fused.run_dir, one.run_dir)
    assert_equal_columns(fused.run_dir, one.run_dir)
    actions = {span.action for span in load_any(fused.run_dir / "trace.json").spans if span.kind == "SCORE"}
    assert {action.split("/")[1] for action in actions if action.startswith("ref.logprobs/")} >= {"p0", "p1"}
    assert not {action for action in actions if action.startswith("critic.values/p")}

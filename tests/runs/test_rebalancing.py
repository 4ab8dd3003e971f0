"""Samples that go on in other instances during a rollout: nothing of what is computed changes. float64."""

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
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_columns, assert_equal_runs

KEYS: dict[str, Any] = {
    "dtype": "float64",
    "steps": 1,
    "prompts_per_step": 6,
    "sampling.max_response_tokens": 40,
    "sampling.stop_token_ids": [*range(3, 300, 12)],  # responses of many lengths
    "micro_batch_tokens": 128,
    "checkpoint.every": 1,
    "fusion": "off",
}
DP2 = {"actor.generate": "0,1 dp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"}
PLANS = {
    "dp2": DP2,
    "leader last": {**DP2, "actor.generate": "1,0 dp2"},
    "prompts apart": {
        "actor.generate prefill": "0",
        "actor.generate": "1 | 2",
        "actor.train": "0,1,2 dp3",
        "ref.logprobs": "0",
    },
    "tp2 beside one": {"actor.generate": "0,1 tp2 | 2", "actor.train": "0,1,2 dp3", "ref.logprobs": "0"},
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "speculation": {"sampling.speculation": 3},
    "samples wait": {"sampling.max_running": 4},
    "from a part": {"sampling.top_p": 0.9},
    "mixture": {"sampling.router_replay": True, "sampling.top_p": 0.9},
}


CASES = [
    *(("dp2", change) for change in CHANGES),
    ("tp2 beside one", "mixture"),
    ("leader last", "plain"),
    *((plan, change) for plan in ("tp2 beside one", "prompts apart") for change in ("plain", "speculation")),
]


@pytest.mark.parametrize("word", ["on", 0.5])
def test_what_rebalance_may_not_be(make_recipe: Callable[..., Recipe], word: Any) -> None:
    with pytest.raises(ConfigError, match="key `rebalance`: "):
        make_recipe(rebalance=word)
    assert make_recipe().rebalance == "off"


@pytest.mark.parametrize(("plan", "change"), slow_but([("dp2", "speculation")], CASES))
def test_moves_change_nothing(make_recipe: Callable[..., Recipe], tmp_path: Path, plan: str, change: str) -> None:
    """The moves of the second step are given as decisions that a run before had made: half of the samples go over
    when 20 are left, the bulk of them ahead, and others come back when 12 are, of which some are computed again."""
    keys = KEYS | CHANGES[change]
    if change == "mixture":
        model = save_tiny(tmp_path / "experts", family="qwen3_moe", num_experts=5, weight_scale=0.05)
        keys |= {"model": str(model)}
    one = make_recipe(**(keys | {"steps": 2}), run_dir=str(tmp_path / "one"))
    run(one)
    keys |= {"rebalance": "auto", "plan": str(write_plan(tmp_path, "plan", PLANS[plan]))}
    placed = make_recipe(**keys, run_dir=str(tmp_path / "placed"))
    run(placed)
    decided = read_rows(placed.run_dir / "rebalancing.jsonl")
    assert [(row["step"], row["moves"]) for row in decided] == [(1, [])], "nothing was measured yet"
    groups = [[(uid, index) for index in range(make_recipe(**keys).samples_per_prompt)] for uid in range(6, 12)]
    over = [key for group in groups for key in group[::2]]
    back = [key for group in groups for key in group[1::2]]
    asked = {"step": 2, "call": "actor.generate", "curve": {"fixed_s": 1.0, "each_s": 1.0, "move_s": 1.0}}
    first = {"left": 20, "pairs": [[0, 1, over]], "ahead": True, "recompute": over[:2]}
    second = {"left": 12, "pairs": [[1, 0, back]], "ahead": False, "recompute": back[::3]}
    asked |= {"moves": [first, second], "move_s": None}
    with open(placed.run_dir / "rebalancing.jsonl", "a") as file:
        file.write(json.dumps(asked) + '\n{"step": 3, "torn')
    run(placed.model_copy(update={"steps": 2}), resume=True)
    assert_equal_runs(placed.run_dir, one.run_dir)
    assert_equal_columns(placed.run_dir, one.run_dir)
    assert read_rows(placed.run_dir / "metrics.jsonl")[1]["perf/samples_moved"] > 0
    rows = read_rows(placed.run_dir / "rebalancing.jsonl")
    assert [row["step"] for row in rows] == [1, 2]


ROUNDS_PLANS = ("dp2", "tp2 beside one")


@pytest.mark.parametrize("plan", slow_but(["dp2"], ROUNDS_PLANS))
def test_moves_of_each_round_change_nothing(make_recipe: Callable[..., Recipe], tmp_path: Path, plan: str) -> None:
    """Groups are drawn in rounds, as those of every second prompt have equal rewards. In each round of the second step
    half of the samples go over when 20 are left, as a run before had decided; a round has decisions of its own."""
    (tmp_path / "some.py").write_text(
        "def some(prompts, completions, **columns):\n"
        "    return [float(i) if int(p.split()[2]) % 2 else 1.0 for i, p in enumerate(prompts)]\n"
    )
    keys = KEYS | {"options": {"dynamic_sampling": True, "max_sampling_rounds": 4, "kl_coef": 0.05}}
    keys |= {"reward.functions": [f"{tmp_path}/some.py:some"], "data.chat_template": False}
    one = make_recipe(**(keys | {"steps": 2}), run_dir=str(tmp_path / "one"))
    run(one)
    rounds = [int(row["dynamic/rounds"]) for row in read_rows(one.run_dir / "metrics.jsonl")]
    assert max(rounds) > 1
    keys |= {"rebalance": "auto", "plan": str(write_plan(tmp_path, "plan", PLANS[plan]))}
    placed = make_recipe(**keys, run_dir=str(tmp_path / "placed"))
    run(placed)
    calls = [f"actor.generate{'' if number == 1 else f'/r{number}'}" for number in range(1, max(rounds) + 1)]
    decided = read_rows(placed.run_dir / "rebalancing.jsonl")
    assert [(row["step"], row["call"], row["moves"]) for row in decided] == [(1, c, []) for c in calls[: rounds[0]]]
    drawn = {sample["uid"] for sample in read_rows(one.run_dir / "samples" / "step-000002.jsonl")}
    uids = sorted({int(uid.split(".")[0]) for uid in drawn})
    with open(placed.run_dir / "rebalancing.jsonl", "a") as file:
        for number, call in enumerate(calls[: rounds[1]]):
            over = [(uid, index) for uid in uids[6 * number : 6 * number + 6] for index in (0, 2)]
            move = {"left": 20, "pairs": [[0, 1, over]], "ahead": True, "recompute": over[:2]}
            curve = {"fixed_s": 1.0, "each_s": 1.0, "move_s": 1.0}
            file.write(json.dumps({"step": 2, "call": call, "curve": curve, "moves": [move], "move_s": None}) + "\n")
    run(placed.model_copy(update={"steps": 2}), resume=True)
    assert_equal_runs(placed.run_dir, one.run_dir)
    assert_equal_columns(placed.run_dir, one.run_dir)
    rows = read_rows(placed.run_dir / "metrics.jsonl")
    assert [row["perf/samples_moved"] > 0 for row in rows] == [False, True]
    assert [(row["step"], row["call"]) for row in read_rows(placed.run_dir / "rebalancing.jsonl")] == [
        (step, call) for step, count in enumerate(rounds, 1) for call in calls[:count]
    ]

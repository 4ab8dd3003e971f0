"""A run whose plan states the order of a pipeline: that order is executed, and changes no bit. Real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.schedule.action import Kind
from plait.schedule.plan import Plan
from plait.schedule.schedule import parse
from plait.schedule.stated import stated_order
from plait.schedule.timeline import load_any
from tests.runs.plan_files import write_plan
from tests.runs.plans import assert_equal_runs, metrics_of, tokens_of

WHERE = {"actor.generate": "0,1 dp2", "actor.train": "0,1 pp2 schedule={}", "ref.logprobs": "0"}

EIGHT = """
rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0F6 0B4 0F7 0B5 0B6 0B7
rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1F6 1B5 1F7 1B6 1B7
"""
"""Each stage has one micro-batch more in flight than with 1F1B, which makes eight for two stages, too."""

TWO = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n"


@pytest.fixture
def planned(place: Path, placed: Callable[..., Recipe]) -> Callable[..., Path]:
    """`planned("name", "1F1B")` or `planned("name", rows)`: the folder of a run of two steps."""

    def make(name: str, order: str, dtype: str = "float32") -> Path:
        states = "\n" in order
        path = write_plan(
            place, name, WHERE | {"actor.train": WHERE["actor.train"].format("mine" if states else order)}
        )
        if states:
            schedule = json.loads(parse(order, "mine").to_json())
            path.write_text(json.dumps(json.loads(path.read_text()) | {"schedules": [schedule]}))
        keys = {"prompts_per_step": 8, "samples_per_prompt": 2, "micro_batch_tokens": 512, "dtype": dtype}
        recipe = placed("grpo", name, steps=2, options={"kl_coef": 0.05}, plan=str(path), **keys)
        assert run(recipe).finished
        return recipe.run_dir

    return make


def executed(run_dir: Path, rank: int) -> list[list[str]]:
    """Ids of the forwards and backwards of each mini-batch of the first step, in the order in which they ran."""
    found: dict[str, list[str]] = {}
    for span in load_any(run_dir / "trace.json").ordered().spans:
        if span.rank == rank and span.step == 1 and span.kind in (Kind.FORWARD, Kind.BACKWARD):
            call, _, action = span.action.rpartition("/")
            if call.startswith("actor.train"):
                found.setdefault(call, []).append(action)
    return list(found.values())


@pytest.mark.slow
def test_an_order_by_hand_is_executed_and_gives_the_bits_of_one_f_one_b(planned: Callable[..., Path]) -> None:
    usual, stated = planned("usual", "1F1B"), planned("stated", EIGHT)
    assert tokens_of(stated) == tokens_of(usual)
    assert metrics_of(stated) == metrics_of(usual)
    mine, theirs = (load_file(folder / "final" / "model.safetensors") for folder in (stated, usual))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    plan = Plan.load(stated / "plan.json")
    order = stated_order(plan.schedules[0], "actor", 2)
    for rank in (0, 1):
        batches = executed(stated, rank)
        assert batches == [[f"actor:{rank}{kind}{index}" for kind, index in order.stages[rank]]]
        assert executed(usual, rank) != batches


@pytest.mark.slow
def test_an_order_for_fewer_micro_batches_makes_fewer(planned: Callable[..., Path]) -> None:
    stated = planned("two", TWO, "float64")
    assert executed(stated, 0) == [["actor:0F0", "actor:0F1", "actor:0B0", "actor:0B1"]]
    assert_equal_runs(stated, planned("gpipe", "gpipe", "float64"))

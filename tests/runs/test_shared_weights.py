"""Ranks of dp that share the weights of what they train (`optimizer.shard_weights`) change nothing. float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.cases import slow_but
from tests.runs.placed_runs import GRPO, PPO, where
from tests.runs.plans import assert_equal_runs

SHARES = {"optimizer.shard_weights": True}
BOTH_SHARE = SHARES | {"critic.optimizer.shard_weights": True}
ADAPTED = {"lora.rank": 4}

RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "grpo-2": (
        "grpo",
        GRPO[1] | {"steps": 2},
        SHARES,
        {"actor.generate": "0,1 tp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"},
    ),
    "grpo-4": (
        "grpo",
        GRPO[1] | {"steps": 3},
        SHARES | {"sequence_parallel": True},
        {"actor.generate": "0,1 dp2", "actor.train": "0,1,2,3 dp2 tp2", "ref.logprobs": "0"},
    ),
    "ppo-4": (
        *PPO,
        BOTH_SHARE,
        {
            "actor.generate": "0,1,2,3 dp4",
            "actor.train": "0,1,2,3 dp2 pp2",
            "ref.logprobs": "0,1,2,3 dp4",
            "critic.train": "0,1,2,3 dp4",
            "critic.values": "0,1,2,3 dp4",
        },
    ),
    "grpo-adapter-2": (
        "grpo",
        GRPO[1] | ADAPTED | {"steps": 2},
        SHARES,
        {"actor.generate": "0,1 tp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"},
    ),
}
"""Flow, what is computed, what is shared, and where."""


@pytest.mark.parametrize("name", slow_but(["grpo-2"], RUNS))
def test_weights_that_ranks_share_change_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    flow, keys, shares, plan = RUNS[name]
    recipe = placed(flow, f"shared-weights-{name}", **keys, **shares, **where(place, f"shared-weights-{name}", plan))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference(flow, **keys))

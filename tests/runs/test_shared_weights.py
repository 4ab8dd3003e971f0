"""Ranks of dp that share the weights of what they train (`optimizer.shard_weights`) change nothing. float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from tests.cases import slow_but
from tests.models.tiny import save_tiny
from tests.runs.placed_runs import GRPO, PPO, SAFE, where
from tests.runs.plans import assert_equal_runs
from tests.runs.test_fused_training import schedule_of

SHARES = {"optimizer.shard_weights": True}
BOTH_SHARE = SHARES | {"critic.optimizer.shard_weights": True}
ADAPTED = {"lora.rank": 4}
DEEP = {"model": "PLACE/deep"}
"""With more layers than there are rooms, on each of two stages, too."""

RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "grpo-2": (
        "grpo",
        GRPO[1] | {"steps": 2},
        SHARES,
        {"actor.generate": "0,1 tp2", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"},
    ),
    "grpo-dropped-2": (  # what generates is gone while the actor trains
        "grpo",
        GRPO[1] | {"steps": 2},
        SHARES,
        {"actor.generate": "0,1 dp2 after=drop", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 dp2"},
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
            "actor.generate": "0,1,2,3 dp4 after=drop",
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


@pytest.fixture(scope="module", autouse=True)
def _deep(place: Path) -> None:
    save_tiny(place / "deep", num_hidden_layers=6)


@pytest.mark.parametrize("name", slow_but(["grpo-2"], RUNS))
def test_weights_that_ranks_share_change_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    flow, keys, shares, plan = RUNS[name]
    keys = keys | DEEP
    recipe = placed(flow, f"shared-weights-{name}", **keys, **shares, **where(place, f"shared-weights-{name}", plan))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference(flow, **keys))


UNDER_ADAPTERS = dict.fromkeys(("actor.train", "ref.logprobs", "critic.train", "critic.values"), "0,1 dp2")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["optimizer.shard_weights", "critic.optimizer.shard_weights"])
def test_who_trains_on_weights_that_are_shared_for_another_role_gathers_them_in_step(
    key: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    """Of three samples one rank has two, and the other takes part without one."""
    keys = {**ADAPTED, **DEEP, "steps": 2, "prompts_per_step": 3, "samples_per_prompt": 1}
    keys |= {"options": {"kl_coef": 0.05, "mini_batches": 1}}
    plan = where(place, key, UNDER_ADAPTERS | {"actor.generate": "0,1 tp2"})
    recipe = placed("ppo", key, **keys, **{key: True, "micro_batch_tokens": 1}, **plan)
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference("ppo", **keys))


ON_TWO = {"actor.generate": "0,1 tp2", "actor.train": "0,1 dp2", "ref.logprobs": "0"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_those_of_divided_gradients(
    dtype: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    """A gathered layer has the numbers that each rank would hold."""
    keys = GRPO[1] | DEEP | {"dtype": dtype, "steps": 2}
    found = []
    for key in ("shard_gradients", "shard_weights"):
        name = f"{key}-{dtype}"
        recipe = placed("grpo", name, **keys, **{f"optimizer.{key}": True}, **where(place, name, ON_TWO))
        assert run(recipe).finished
        found.append(recipe.run_dir)
    assert_equal_runs(*found, tolerance=0.0)


@pytest.mark.slow
def test_a_run_goes_on_to_the_bit(place: Path, placed: Callable[..., Recipe]) -> None:
    plan = {"actor.generate": "0,1 tp2", "actor.train": "0,1,2,3 dp2 pp2", "ref.logprobs": "0"}

    def recipe(name: str, steps: int) -> Recipe:
        keys = GRPO[1] | DEEP | {"dtype": "bfloat16", "steps": steps} | SHARES
        return placed("grpo", f"shared-{name}", **keys, **where(place, "shared-bits", plan))

    for going_on, steps in ((False, 1), (True, 3)):
        assert run(recipe("parts", steps), resume=going_on).finished
    whole = recipe("whole", 3)
    assert run(whole).finished
    assert_equal_runs(recipe("parts", 3).run_dir, whole.run_dir, tolerance=0.0)


CHANGED = {"then whole": (True, False), "whole, then shared": (False, True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_a_run_goes_on_with_weights_that_lie_otherwise(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    """Shares are those of the masters, which checkpoints hold: they say nothing of weights."""
    run_name = f"changed-shares-{tuple(CHANGED).index(name)}"

    def recipe(steps: int, shares: bool) -> Recipe:
        train = "0,1 dp2" if shares else "0,1 tp2"
        plan = {"actor.generate": "0,1 dp2", "actor.train": train, "ref.logprobs": "0"}
        how = DEEP | {"steps": steps, "optimizer.shard_weights": shares}
        return placed("grpo", run_name, **GRPO[1] | how, **where(place, run_name, plan))

    before, after = CHANGED[name]
    assert run(recipe(1, before)).finished
    assert run(recipe(2, after), resume=True).finished
    assert_equal_runs(place / run_name, reference("grpo", **GRPO[1] | DEEP | {"steps": 2}))


def test_ranks_that_share_weights_score_together(place: Path, placed: Callable[..., Recipe]) -> None:
    """So no samples are scored in parts, each by one rank: where that is asked for, it is refused."""
    plan = {
        "actor.generate": "0,1 dp2",
        "ref.logprobs": "0,1 dp2",
        **dict.fromkeys(("actor.train", "critic.train", "critic.values"), "0,1 dp2"),
    }
    keys = PPO[1] | BOTH_SHARE | where(place, "shared-scoring", plan)
    prepared = prepare(placed("ppo", "shared-scoring", **keys))
    shares = {(p.call, p.mode): p.shards_weights for p in prepared.plan.placements}
    assert {of for of, is_shared in shares.items() if is_shared} == {
        ("actor.train", "train"),
        ("critic.train", "train"),
        ("critic.values", "score"),
    }, "to score, the ranks have the actor whole, as they generate with it"
    with pytest.raises(ConfigError, match="ranks that share weights score together"):
        prepare(placed("ppo", "shared-scoring-fused", **keys, fusion=0.5))


def test_who_trains_with_others_on_weights_that_are_shared_for_another_role_is_refused(
    place: Path, placed: Callable[..., Recipe]
) -> None:
    """Under adapters all roles have the actor's weights, so the critics' would be gathered in one schedule."""
    on_all = "0,1,2,3 dp2 pp2"
    critics = {"critic.train": f"{on_all} schedule=both", "cost_critic.train": "1,0,3,2 dp2 pp2 schedule=both"}
    scoring = dict.fromkeys(("ref.logprobs", "critic.values", "cost_critic.values"), on_all)
    plan = {"actor.generate": "0,1 tp2", "actor.train": on_all, **scoring, **critics}
    schedules = [schedule_of((2, 2), (2, 2), ("critic", "cost_critic"))]
    keys = SAFE[1] | ADAPTED | SHARES | where(place, "shared-critics", plan, schedules)
    with pytest.raises(ConfigError, match=r"critic.train is in the schedule .* of the optimizer of actor\)"):
        prepare(placed("safe_rlhf", "shared-critics", **keys))

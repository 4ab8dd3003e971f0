"""Prompts that are computed on other instances than samples are drawn on: that changes nothing of what is computed.
float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.cost.call_memory import ON_THEIR_WAY, working_rows
from plait.cost.model_parameters import parameters_of
from plait.cost.placed import Facts
from plait.observe.run_log import read_rows
from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from plait.runtime.prepare import prepare
from plait.schedule.timeline import load_any
from tests.cases import slow_but
from tests.runs.placed_runs import FUSED_PPO, GRPO, LONG, OWN, PPO, Flow, where
from tests.runs.plans import assert_equal_runs
from tests.runs.test_placements import bits_of

CHUNKED = ("grpo", GRPO[1] | LONG | {"sampling.max_prefill_tokens": 7, "prompts_per_step": 6})
"""Prompts take several steps, so that samples of some run when others come."""
PACED = ("grpo", CHUNKED[1] | {"sampling.kv_tokens": 112, "sampling.max_running": 5})
"""A pool that has room for a group and a half."""

PLANS: dict[str, tuple[Flow, dict[str, str]]] = {
    "grpo-2": (GRPO, {"actor.generate prefill": "0", "actor.generate": "1", "actor.train": "1", "ref.logprobs": "0"}),
    "grpo-leader-draws-2": (
        CHUNKED,
        {"actor.generate prefill": "1", "actor.generate": "0", "actor.train": "0,1 dp2", "ref.logprobs": "0,1 tp2"},
    ),
    "grpo-paced-2": (
        PACED,
        {"actor.generate prefill": "1", "actor.generate": "0", "actor.train": "0,1 tp2", "ref.logprobs": "1"},
    ),
    "grpo-into-stages-3": (
        CHUNKED,
        {
            "actor.generate prefill": "0 after=offload",
            "actor.generate": "1,2 pp2 after=drop",
            "actor.train": "0,1,2 dp3",
            "ref.logprobs": "0",
        },
    ),
    "grpo-tp2-4": (
        CHUNKED,
        {
            "actor.generate prefill": "0,1 tp2",
            "actor.generate": "2,3 dp2",
            "actor.train": "0,1,2,3 dp2 tp2",
            "ref.logprobs": "0,1,2,3 dp4",
        },
    ),
    "grpo-into-tp2-4": (
        PACED,
        {
            "actor.generate prefill": "1,0 dp2",
            "actor.generate": "3,2 tp2",
            "actor.train": "2,3 dp2",
            "ref.logprobs": "0,1 dp2",
        },
    ),
    "ppo-stages-4": (
        PPO,
        {
            "actor.generate prefill": "1,2 pp2",
            "actor.generate": "0 | 3",
            "actor.train": "0,1,2,3 tp2 pp2",
            "ref.logprobs": "0,1 tp2",
            "critic.train": "2,3 dp2",
            "critic.values": "2,3 dp2",
        },
    ),
    "own-2": (
        OWN,
        {
            "actor.generate prefill": "1",
            "actor.generate": "0",
            "actor.train": "0,1 dp2",
            "ref.logprobs": "1",
            "critic.train": "0",
            "critic.values": "1",
        },
    ),
}
STEPS = 2


@pytest.mark.slow
def test_in_exact_mode_to_the_bit(place: Path, placed: Callable[..., Recipe]) -> None:
    keys = {**CHUNKED[1], "steps": STEPS, "dtype": "float32", "sampling.exact": True}
    plan = {"actor.generate prefill": "1", "actor.generate": "0", "actor.train": "0", "ref.logprobs": "0"}
    apart = placed("grpo", "prefill-exact", **keys, **where(place, "prefill-exact", plan))
    alone = placed("grpo", "prefill-exact-alone", **keys)
    for recipe in (apart, alone):
        assert run(recipe).finished
    assert bits_of(apart.run_dir) == bits_of(alone.run_dir)


THREE = {"actor.generate prefill": "0", "actor.generate": "1 | 2", "actor.train": "0,1,2 dp3", "ref.logprobs": "0"}
FILTERED = ("grpo", {"options": {**GRPO[1]["options"], "dynamic_sampling": True, "max_sampling_rounds": 3}})
TURNS = {
    "turns.reply": "PLACE/tools.py:reply",
    "turns.most": 3,
    "sampling.max_response_tokens": 60,
    "sampling.stop_token_ids": [2, *range(3, 300, 6)],
}
TOOLS = """
def reply(messages, **columns):
    said = messages[-1]["content"]
    return None if len(said) % 3 == 0 else {"role": "user", "content": f"{len(said)} characters"}
"""
BESIDE: dict[str, tuple[Flow, dict[str, Any], dict[str, str]]] = {
    "draws again": (FILTERED, {}, PLANS["grpo-2"][1]),
    "guesses": (CHUNKED, {"sampling.speculation": 3}, PLANS["grpo-2"][1]),
    "turns": (GRPO, TURNS, PLANS["grpo-2"][1]),
    "turns of prompts": (GRPO, TURNS | {"turns.wait_for": "prompt"}, THREE),
    "evaluates": (GRPO, {"evaluation.items": 4, "evaluation.every": 1}, PLANS["grpo-2"][1]),
    "adapters": (GRPO, {"lora.rank": 4}, PLANS["grpo-2"][1]),
    "stale": (
        GRPO,
        {"max_staleness": 1, "steps": 4},
        {"actor.generate prefill": "2", "actor.generate": "1", "actor.train": "0", "ref.logprobs": "0"},
    ),
    "caches prompts": (CHUNKED, {"sampling.prefix_cache_tokens": 64}, PLANS["grpo-2"][1]),
    "rebalances": (CHUNKED, {"rebalance": "auto", "steps": 6}, THREE),
    "fuses": (
        FUSED_PPO,
        {},
        {
            "actor.generate prefill": "0",
            "actor.generate": "1 | 2",
            "actor.train": "0,1,2 dp3",
            "ref.logprobs": "0,1,2 dp3",
            "critic.train": "0,1,2 dp3",
            "critic.values": "0,1,2 dp3",
            "reward.score": "0,1,2 dp3",
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_what_else_a_run_does(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    (flow, keys), more, plan = BESIDE[name]
    (place / "tools.py").write_text(TOOLS)
    keys = {"steps": STEPS} | keys | more
    recipe = placed(flow, f"beside-{name.replace(' ', '-')}", **keys, **where(place, f"beside-{name}", plan))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference(flow, **keys))
    if name == "fuses":
        assert sum(row.get("perf/samples_moved", 0) for row in read_rows(recipe.run_dir / "metrics.jsonl")) > 0


@pytest.mark.parametrize("name", slow_but(("grpo-2", "grpo-paced-2"), PLANS))
def test_prompts_that_are_computed_elsewhere_change_nothing(
    name: str, place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]
) -> None:
    (flow, keys), plan = PLANS[name]
    recipe = placed(flow, f"prefill-{name}", **{"steps": STEPS} | keys, **where(place, f"prefill-{name}", plan))
    assert run(recipe).finished
    assert_equal_runs(recipe.run_dir, reference(flow, **{"steps": STEPS} | keys))
    if flow != "own":  # it draws twice from each prompt
        assert_computed_once(recipe, plan)
    assert_foretold(recipe)


def assert_computed_once(recipe: Recipe, plan: dict[str, str]) -> None:
    """All tokens of prompts on the instances that compute them. Those that draw compute the last token of each prompt,
    and each token that they draw but the last."""
    by_rank: dict[int, int] = {}
    for span in load_any(recipe.run_dir / "trace.json").spans:
        if span.whole == "actor.generate":
            by_rank[span.rank] = by_rank.get(span.rank, 0) + span.tokens
    prompts = drawn = num_prompts = 0
    for file in (recipe.run_dir / "samples").glob("*.jsonl"):
        rows = read_rows(file)
        drawn += sum(len(row["token_ids"]) - 1 for row in rows)
        of_prompts = {row["uid"].rpartition(".")[0]: len(row["prompt_ids"]) for row in rows}
        num_prompts += len(of_prompts)
        prompts += sum(of_prompts.values())
    assert sum(by_rank[rank] for rank in firsts(plan["actor.generate prefill"])) == prompts
    assert sum(by_rank[rank] for rank in firsts(plan["actor.generate"])) == drawn + num_prompts


def assert_foretold(recipe: Recipe) -> None:
    """What of prompts comes to a rank by one load has the room that is foretold."""
    prepared = prepare(recipe)
    models, shapes, flow = prepared.models, prepared.shapes, prepared.flow
    facts = Facts(recipe, models, shapes, parameters_of(models), prepared.plan, flow, prepared.lengths)
    loads = [s for s in load_any(recipe.run_dir / "trace.json").spans if "/prompts" in s.action and s.bytes]
    assert loads
    for span in loads:
        rows = working_rows(span.rank, facts, next(model for model in models if model.role == "actor"))
        [room] = [count for what, count in rows["actor", "decode"] if what.startswith(ON_THEIR_WAY)]
        assert span.bytes <= room


def firsts(texts: str) -> list[int]:
    """The first rank of each instance."""
    found: list[int] = []
    for text in texts.split("|"):
        ranks, *words = text.split()
        size = 1
        for word in words:
            size *= int(word[2:]) if word[:2] in ("tp", "pp") else 1
        found += [int(rank) for rank in ranks.split(",")][::size]
    return found

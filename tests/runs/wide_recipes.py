"""Recipes of any options on four ranks: each role on a part of them, instances of two, and what leaves its device."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.runs import random_flows as flows
from tests.runs.random_recipes import AHEAD, ENDINGS, HOW, ROLLOUTS, TURNS, WHAT, Draw, Drawn, calls_of, drawn_by
from tests.runs.test_random_plans import random_plan

RANKS = 4
WIDE_WHAT = (
    *WHAT,
    Draw(0.3, AHEAD, ROLLOUTS),
    Draw(0.15, ({**TURNS, "turns.max_turns": 3},), ROLLOUTS),
    Draw(0.15, ({"lora.rank": 2},)),
)
WIDE_HOW = (
    *HOW,
    Draw(0.4, ({"sequence_parallel": True},)),
    Draw(0.5, ({"optimizer.shard_gradients": True},)),
    Draw(0.6, ({"sampling.prefix_cache_tokens": 300},), ROLLOUTS),
)
"""Some keys of `WHAT` and `HOW` again, of which the later draw counts: several ranks compute otherwise with them."""


def wide_recipe(seed: int) -> Drawn:
    """As `random_recipe`, on four ranks, with more of what concerns several."""
    chance = random.Random(f"wide recipe {seed}")
    drawn = drawn_by(chance, (WIDE_WHAT, WIDE_HOW), _plan)
    return replace(drawn, by=chance.choice(ENDINGS))


def _plan(chance: random.Random, algorithm: str, what: dict[str, Any]) -> str | dict[str, str]:
    calls = tuple(calls_of(algorithm, what))
    if chance.random() < 0.1:
        several = len({_role_of(call) for call in calls}) > 1
        return chance.choice(["colocated 4", *(["split 4"] if several else [])])
    keeps_state = flows.family_of(what) in flows.KEEP_STATE  # their layers are sharded in two at most
    is_divided = chance.random() < 0.4 or keeps_state
    plan = _divided(chance, calls) if is_divided else random_plan(calls, RANKS, str(chance.random()))
    if "actor.generate" in plan and chance.random() < 0.4:
        plan |= _instances_of_two(chance)
    if keeps_state or "partial_rollout" in what:
        plan = {call: text for call, text in plan.items() if not call.endswith(" prefill")}
    if chance.random() < 0.5:
        trained = {_role_of(call) for call in calls if call.endswith(".train")} if "lora.rank" not in what else set()
        plan = {call: _leaving(chance, call, text, _role_of(call) in trained) for call, text in plan.items()}
    return _renumbered(plan)


def _role_of(call: str) -> str:
    return call.partition(".")[0]


def _divided(chance: random.Random, calls: tuple[str, ...]) -> dict[str, str]:
    """Each role on two ranks of its own, or on the two of some others."""
    ranks = chance.sample(range(RANKS), RANKS)
    groups = {role: chance.choice((ranks[:2], ranks[2:])) for role in sorted({_role_of(call) for call in calls})}
    plan = {}
    for role, group in groups.items():
        own = random_plan(tuple(call for call in calls if _role_of(call) == role), 2, str(chance.random()))
        plan |= {call: _with_ranks(text, dict(enumerate(group))) for call, text in own.items()}
    return plan


def _instances_of_two(chance: random.Random) -> dict[str, str]:
    """Two of them, which both draw, or of which one computes the prompts."""
    ranks = chance.sample(range(RANKS), RANKS)
    texts = [f"{first},{second} {chance.choice(('tp2', 'pp2'))}" for first, second in (ranks[:2], ranks[2:])]
    if chance.random() < 0.3:
        return {"actor.generate": texts[0], "actor.generate prefill": texts[1]}
    return {"actor.generate": " | ".join(texts), "actor.generate prefill": ""}


def _leaving(chance: random.Random, call: str, text: str, is_trained: bool) -> str:
    """With what becomes of the weights in each of its places."""
    may_drop = is_trained and not call.endswith(".train")
    kinds = ("", " after=offload", " after=drop") if may_drop else ("", " after=offload")
    parts = [part.replace(" after=offload", "").strip() for part in text.split("|")]
    return " | ".join(part + chance.choice(kinds) for part in parts if part)


def _renumbered(plan: dict[str, str]) -> dict[str, str]:
    """Without ranks that have nothing to do."""
    used = sorted({int(rank) for text in plan.values() for part in text.split("|") if part for rank in _ranks(part)})
    return {call: _with_ranks(text, {rank: n for n, rank in enumerate(used)}) for call, text in plan.items() if text}


def _ranks(part: str) -> list[str]:
    return part.split()[0].split(",")


def _with_ranks(text: str, names: dict[int, int]) -> str:
    parts = [part.split(maxsplit=1) for part in text.split("|")]
    renamed = [[",".join(str(names[int(rank)]) for rank in ranks.split(",")), *rest] for ranks, *rest in parts]
    return " | ".join(" ".join(words).strip() for words in renamed)

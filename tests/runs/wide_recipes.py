"""Recipes of any options on four ranks: each role on a part of them, instances of two, and what leaves its device."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from tests.runs import random_flows as flows
from tests.runs import random_recipes
from tests.runs.random_recipes import (
    AHEAD,
    ENDINGS,
    HOW,
    ROLLOUTS,
    TURNS,
    WHAT,
    WITH_CRITIC,
    Draw,
    Drawn,
    calls_of,
    drawn_by,
    one_of,
    sharing,
    without,
)
from tests.runs.test_fused_training import schedule_of
from tests.runs.test_random_plans import random_plan

RANKS = 4
SEVERAL_ASKED = {
    "evaluation.items": 3,
    "evaluation.every": 1,
    "evaluation.samples_per_prompt": 2,
    "evaluation.temperature": 0.7,
}
TOGETHER = (
    ("0,1 pp2", "1,0 pp2"),
    ("0,1 pp2", "0,1 dp2"),
    ("0,1,2,3 dp2 pp2", "1,0,3,2 dp2 pp2"),
    ("0,1,2,3 dp2 pp2", "0,1,2,3 dp4"),
    ("0,1,2,3 tp2 pp2", "2,3,0,1 tp2 pp2"),
)
"""Where an actor and a critic train by one schedule; models with recurrent layers by one of the first two."""
WIDE_WHAT = (
    *WHAT,
    Draw(0.3, AHEAD, ROLLOUTS),
    Draw(0.15, ({**TURNS, "turns.max_turns": 3},), ROLLOUTS),
    Draw(0.15, ({"lora.rank": 2},)),
    Draw(0.3, one_of("lora.target_modules", ["q_proj", "v_proj"], ["o_proj", "down_proj"], ["up_proj"])),
    Draw(0.4, ({"critic.optimizer.learning_rate": 3e-4, "critic.optimizer.max_grad_norm": 0.05},), WITH_CRITIC),
    Draw(0.5, one_of("cost.model", "PLACE/other_scorer"), ("safe_rlhf",)),
    Draw(0.5, one_of("reference.mixup", 0.3)),
    Draw(0.3, one_of("turns.wait_for", "prompt", "step"), ROLLOUTS),
    Draw(0.2, (SEVERAL_ASKED,), ROLLOUTS),
)
WIDE_HOW = (
    *HOW,
    Draw(0.4, ({"sequence_parallel": True},)),
    Draw(0.5, ({"optimizer.shard_gradients": True},)),
    Draw(0.6, ({"sampling.prefix_cache_tokens": 300},), ROLLOUTS),
    Draw(0.4, one_of("sampling.decode_groups", 1, 2, 3), ROLLOUTS),
    Draw(0.3, one_of("critic.optimizer.shard_gradients", True), WITH_CRITIC),
)
"""Some keys of `WHAT` and `HOW` again, of which the later draw counts: several ranks compute otherwise with them."""


def wide_recipe(seed: int) -> Drawn:
    """As `random_recipe`, on four ranks, with more of what concerns several."""
    chance = random.Random(f"wide recipe {seed}")
    drawn = drawn_by(chance, (WIDE_WHAT, WIDE_HOW), plan_on_four, fit=leave_what_goes_together)
    return sharing(ended(drawn, chance), f"wide recipe {seed}")


def ended(drawn: Drawn, chance: random.Random) -> Drawn:
    """The same, ended in some way; without what its schedules take no part in."""
    if schedules_of(drawn.plan) or schedules_of(drawn.then):  # two copies may follow one
        drawn.ways.pop("critic.optimizer.shard_gradients", None)
    return replace(drawn, by=chance.choice(ENDINGS))


def leave_what_goes_together(algorithm: str, what: dict[str, Any], how: dict[str, Any]) -> None:
    """Takes away what is refused beside something else."""
    random_recipes.leave_what_goes_together(algorithm, what, how)
    if "lora.rank" not in what or flows.family_of(what) not in ("", "qwen3", "gemma2"):  # others have other names
        without(what, "lora.target_modules")
    for key, with_what in (("turns.wait_for", "turns.reply"), ("reference.mixup", "reference.sync_every")):
        if with_what not in what:
            without(what, key)
    if "partial_rollout" in what and what.get("turns.wait_for") == "step":
        without(what, "turns.wait_for")
    if "evaluation.items" not in what:
        without(what, "evaluation.temperature", "evaluation.samples_per_prompt")


def schedules_of(plan: str | dict[str, str]) -> list[str]:
    """The files of the schedules of a plan."""
    texts = {} if isinstance(plan, str) else {call: text for call, text in plan.items() if "schedule=both" in text}
    if not texts:
        return []
    chance = random.Random(str(plan))
    stages = tuple(_cut(text)[1] for text in texts.values())
    counts = tuple(chance.choice((1, 2, 3)) for _ in stages)
    return [schedule_of(stages, counts, tuple(map(_role_of, texts)))]


def plan_on_four(chance: random.Random, algorithm: str, what: dict[str, Any]) -> str | dict[str, str]:
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
    if algorithm in WITH_CRITIC and chance.random() < 0.5:
        actor, critic = chance.choice(TOGETHER[: 2 if keeps_state else None])
        plan |= {"actor.train": f"{actor} schedule=both", "critic.train": f"{critic} schedule=both"}
    if chance.random() < 0.5:
        homes = {} if "lora.rank" in what else {_role_of(call): plan[call] for call in calls if call.endswith(".train")}
        plan = {call: _leaving(chance, text, homes.get(_role_of(call))) for call, text in plan.items()}
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


def _leaving(chance: random.Random, text: str, home: str | None) -> str:
    """With what becomes of the weights in each of its places; they are dropped where they come from another home."""
    parts = [part.replace(" after=offload", "").strip() for part in text.split("|")]
    kept, dropped = ("", " after=offload"), (" after=drop",)
    return " | ".join(
        part + chance.choice(kept if home is None or _is_within(part, home) else kept + dropped)
        for part in parts
        if part
    )


def _is_within(part: str, home: str) -> bool:
    """Whether ranks have nothing there that they do not have in their home."""
    return {*_ranks(part)} <= {*_ranks(home)} and _cut(part) == _cut(home)


def _cut(part: str) -> tuple[int, ...]:
    """By tensor and pipeline parallelism."""
    return tuple(int(found[1]) if (found := re.search(rf" {how}(\d)", part)) else 1 for how in ("tp", "pp"))


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

"""Plans nobody thought of: random layouts and instances of every call. The test's id is the seed of its plan, and the
plan is printed where it fails. float64, as in `test_placements`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from plait.recipes.recipe import Recipe
from plait.runtime.api import run
from tests.models.tiny import save_tiny
from tests.runs.placed_runs import GRPO, OWN, PPO, SAFE, Flow, where
from tests.runs.plans import assert_equal_runs

STEPS = 3
LARGEST_TP, LARGEST_PP = 4, 2
"""Query heads and layers of the tiny model."""

FLOWS: dict[str, tuple[Flow, tuple[str, ...]]] = {
    "grpo": (GRPO, ("actor.generate", "actor.train", "ref.logprobs")),
    "ppo": (
        PPO,
        ("actor.generate", "actor.train", "actor.logprobs", "ref.logprobs", "critic.train", "critic.values"),
    ),
    "safe": (
        SAFE,
        (
            *("actor.generate", "actor.train", "ref.logprobs", "critic.train", "critic.values"),
            *("cost_critic.train", "cost_critic.values"),
        ),
    ),
    "own": (
        OWN,
        ("actor.generate", "actor.train", "actor.logprobs", "ref.logprobs", "critic.train", "critic.values"),
    ),
}
MIXTURE = ("actor.generate", "actor.train", "ref.logprobs")
ROUTED = {"sampling.router_replay": True, "optimizer.router_aux_loss_coef": 0.1}
PART = {"sampling.top_p": 0.9, "sampling.min_p": 0.1}
MIXTURES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "narrow": ("qwen3_moe", {**ROUTED, **PART}, {"sampling.speculation": 2, "rebalance": "auto"}),
    "adapters": ("qwen3_moe", {"lora.rank": 2, "sampling.router_replay": True}, {"sampling.decode_groups": 3}),
    "wide": ("mixtral", {**ROUTED, **PART}, {"sampling.speculation": 2, "sampling.decode_groups": 3}),
    "sinks": ("gpt_oss", ROUTED, {"rebalance": "auto"}),
    "shared": ("deepseek_v3", {"sampling.router_replay": True, **PART}, {"sampling.max_running": 3}),
}
"""Name → family, keys of what is trained, and keys that change nothing. Of five experts ranks have uneven numbers."""
FIVE: dict[str, Any] = {"num_experts": 5, "num_local_experts": 5, "n_routed_experts": 5}
SEEDS_OF_MIXTURES = {2: 2, 4: 2}
SEEDS_OF = {1: 1, 2: 2, 4: 2}
"""Ranks → seeds of each flow."""


def random_plan(calls: tuple[str, ...], num_ranks: int, seed: str) -> dict[str, str]:
    """On `num_ranks` ranks, or fewer where the draw leaves one out."""
    chance = random.Random(seed)
    drawn = {
        call: _instances(chance, num_ranks) if call.endswith(".generate") else [_layout(chance, num_ranks)]
        for call in calls
    }
    used = sorted({rank for layouts in drawn.values() for ranks, _ in layouts for rank in ranks})
    places = {}
    apart = random.Random(f"{seed} prompts")
    for call, layouts in list(drawn.items()):
        if call.endswith(".generate") and len(layouts) > 1 and apart.random() < 0.4:
            drawn[call], drawn[f"{call} prefill"] = layouts[:-1], layouts[-1:]
    for call, layouts in drawn.items():
        options = _options(chance, call, " pp2" in layouts[0][1])
        texts = [",".join(str(used.index(rank)) for rank in ranks) + sizes + options for ranks, sizes in layouts]
        places[call] = " | ".join(texts)
    return places


def _layout(chance: random.Random, num_ranks: int, *, copies: bool = True) -> tuple[list[int], str]:
    """Ranks in any order, and their sizes; one copy alone where `copies` is false."""
    several = [
        (dp, tp, pp)
        for dp in range(1, num_ranks + 1 if copies else 2)
        for tp in range(1, LARGEST_TP + 1)
        for pp in range(1, LARGEST_PP + 1)
        if dp * tp * pp <= num_ranks
    ]
    dp, tp, pp = chance.choice(several)
    return chance.sample(range(num_ranks), dp * tp * pp), f" dp{dp} tp{tp} pp{pp}"


def _instances(chance: random.Random, num_ranks: int) -> list[tuple[list[int], str]]:
    """Instances of any sizes, on ranks of their own."""
    free = chance.sample(range(num_ranks), num_ranks)
    found = []
    while free and (not found or chance.random() < 0.7):
        members, sizes = _layout(chance, len(free), copies=False)
        found.append(([free[i] for i in members], sizes))
        free = [rank for i, rank in enumerate(free) if i not in members]
    return found


def _options(chance: random.Random, call: str, staged: bool) -> str:
    words = []
    if chance.random() < 0.3:
        words.append("after=offload")
    if ".generate" not in call and chance.random() < 0.4:
        words.append(f"micro_batch_tokens={chance.choice((32, 100, 500))}")
    if call.endswith(".train") and staged:
        words.append(f"schedule={chance.choice(('1F1B', 'gpipe'))}")
    return "".join(f" {word}" for word in words)


class OnPlan(Protocol):
    def __call__(self, name: str, flow: Flow, plan: dict[str, str], **how: Any) -> None: ...


@pytest.fixture
def changes_nothing(place: Path, placed: Callable[..., Recipe], reference: Callable[..., Path]) -> OnPlan:
    """`changes_nothing(name, (algorithm, keys), plan, **how)`: a run by the plan is that of one process."""

    def compare(name: str, flow: Flow, plan: dict[str, str], **how: Any) -> None:
        print(plan)
        algorithm, keys = flow
        recipe = placed(algorithm, name, steps=STEPS, **keys, **how, **where(place, name, plan))
        run(recipe)
        assert_equal_runs(recipe.run_dir, reference(algorithm, steps=STEPS, **keys))

    return compare


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flow", "num_ranks", "seed"),
    [(flow, ranks, seed) for flow in FLOWS for ranks, seeds in SEEDS_OF.items() for seed in range(seeds)],
)
def test_a_random_plan_changes_nothing(flow: str, num_ranks: int, seed: int, changes_nothing: OnPlan) -> None:
    runs, calls = FLOWS[flow]
    name = f"{flow}-{num_ranks}-{seed}"
    changes_nothing(name, runs, random_plan(calls, num_ranks, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks", "seed"),
    [(name, ranks, seed) for name in MIXTURES for ranks, seeds in SEEDS_OF_MIXTURES.items() for seed in range(seeds)],
)
def test_a_random_plan_of_a_mixture_changes_nothing(
    name: str, num_ranks: int, seed: int, place: Path, changes_nothing: OnPlan
) -> None:
    """Each plan divides experts over ranks that have the same tokens."""
    family, what, how = MIXTURES[name]
    model = place / f"five-{family}"
    if not model.exists():
        save_tiny(model, family=family, weight_scale=0.05, **FIVE)
    run_name = f"{name}-{num_ranks}-{seed}"
    keys = GRPO[1] | what | {"model": str(model)}
    changes_nothing(run_name, ("grpo", keys), plan_with_tp(MIXTURE, num_ranks, run_name), **how)


DIVIDED = {"grpo": 2, "ppo": 2, "safe": 1}
"""Flow → seeds."""


@pytest.mark.slow
@pytest.mark.parametrize(("flow", "seed"), [(flow, seed) for flow, seeds in DIVIDED.items() for seed in range(seeds)])
def test_gradients_of_stages_that_are_divided_change_nothing(flow: str, seed: int, changes_nothing: OnPlan) -> None:
    """Each plan trains some role by copies of stages, which have unequal numbers of micro-batches or none."""
    runs, calls = FLOWS[flow]
    name = f"divided-{flow}-{seed}"
    roles = [call.removesuffix(".train") for call in calls if call.endswith(".train")]
    sections = ["" if role == "actor" else f"{role}." for role in roles]
    how = {f"{section}optimizer.shard_gradients": True for section in sections}
    changes_nothing(name, runs, plan_with(" dp2 tp1 pp2", calls, 4, name), **how)


PARTED = {
    "narrow": "0,1,2,3 tp2 pp2",
    "adapters": "1,0 tp2",
    "wide": "0,1,2,3 dp2 tp2",
    "sinks": "0,1 tp2",
    "shared": "0,1 tp2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTED)
def test_tokens_of_a_mixture_that_are_parted_change_nothing(name: str, place: Path, changes_nothing: OnPlan) -> None:
    """Between its layers; router and experts have all of them."""
    family, what, _ = MIXTURES[name]
    model = place / f"five-{family}"
    if not model.exists():
        save_tiny(model, family=family, weight_scale=0.05, **FIVE)
    plan = {"actor.generate": "0", "actor.train": PARTED[name], "ref.logprobs": "1"}
    keys = GRPO[1] | what | {"model": str(model)}
    how = {"sequence_parallel": True, "checkpoint_activations": name != "wide"}
    changes_nothing(f"parted-{name}", ("grpo", keys), plan, **how)


def plan_with_tp(calls: tuple[str, ...], num_ranks: int, seed: str) -> dict[str, str]:
    """The first random plan with tp where the policy is trained or generates."""
    plans = (random_plan(calls, num_ranks, f"{seed}-{number}") for number in itertools.count())
    has_tp = lambda text: "tp1" not in text.partition("|")[0]
    return next(plan for plan in plans if has_tp(plan["actor.train"]) or has_tp(plan["actor.generate"]))


def plan_with(sizes: str, calls: tuple[str, ...], num_ranks: int, seed: str) -> dict[str, str]:
    """The first random plan in which a role is trained by these sizes."""
    plans = (random_plan(calls, num_ranks, f"{seed}-{number}") for number in itertools.count())
    return next(plan for plan in plans if any(sizes in plan[call] for call in calls if call.endswith(".train")))


def test_plans_are_reproducible_and_differ() -> None:
    calls = FLOWS["safe"][1]
    plans = [random_plan(calls, 4, f"safe-4-{seed}") for seed in range(20)]
    assert plans == [random_plan(calls, 4, f"safe-4-{seed}") for seed in range(20)]
    assert len({str(plan) for plan in plans}) == 20
    said = " ".join(text for plan in plans for text in plan.values())
    for word in ("dp4", "tp2", "pp2", "tp4", "|", "after=offload", "micro_batch_tokens=32", "schedule=gpipe"):
        assert word in said
    assert any("actor.generate prefill" in plan for plan in plans)

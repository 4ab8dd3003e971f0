"""Plans of a thousand devices are made, checked and forecast at once: work goes by kinds of devices, not by pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost import device_memory
from plait.cost.device_memory import memory_by_device
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.placed import Facts
from plait.cost.placement import check_layouts, planned_models
from plait.cost.rank_order import better_orders
from plait.layout.decoder import decoder_parameters
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES, role_models
from plait.schedule.completion import complete
from plait.schedule.named_plans import NAMES, named_plan
from plait.schedule.plan import Placement, Plan
from tests.cost.smollm2 import SHAPE, SIZES

PARAMETERS = decoder_parameters(**SIZES, vocabulary=49152, tied=True)


def facts_of(make_plan, algorithm="ppo", lora=0, model="smollm", **keys) -> Facts:
    """Facts of a recipe whose every model is a SmolLM2-135M; `make_plan` takes the flow and what is planned with."""
    recipe = Recipe.model_validate(
        {"model": model, "algorithm": algorithm, "data": {"source": "none.jsonl"}, "lora": {"rank": lora}, **keys}
    )
    given = algorithm in ("sft", "dpo", "kto", "distill", "reward_model")
    options = recipe.options if given else {"kl_coef": 0.1, **recipe.options}
    flow = trace_algorithm(load_flow(algorithm), options, (*MODEL_ROLES, *REWARD_ROLES))
    models = role_models(flow, recipe)
    shapes = {one.name: SHAPE for one in models}
    every = planned_models(recipe, models, shapes)
    planned = {role: replace(one, head_in_layers=1.0, pair_tokens=0.0) for role, one in every.items()}
    plan = complete(make_plan(flow, planned), flow, planned, "plan")
    lengths = SampleLengths(Lengths.fixed(128), Lengths.fixed(recipe.sampling.max_response_tokens))
    return Facts(recipe, models, shapes, dict.fromkeys(planned, PARAMETERS), plan, flow, lengths)


def row_of(begins: str, rows: dict[str, int]) -> int:
    """The bytes of the one row whose name begins so."""
    (count,) = (count for what, count in rows.items() if what.startswith(begins))
    return count


def named(name, devices, tp=1):
    return lambda flow, planned: named_plan(name, flow, planned, devices, tp=tp)


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_devices_all_have_their_memory(name, tp):
    facts = facts_of(named(name, 1000, tp))
    check_layouts(facts.plan, facts.parameters, "plan")
    columns = memory_by_device(facts)
    assert better_orders(facts.recipe, facts.models, facts.plan) == []
    assert sorted(rank for one in columns for rank in one.ranks) == list(range(1000))


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_counted_once_for_each_kind_of_device(name, monkeypatch):
    """tp 2 has two kinds in each mesh, and ZeRO's ranges are of at most two lengths for each of these."""
    counted = []
    count = device_memory._of_device
    monkeypatch.setattr(device_memory, "_of_device", lambda rank, facts: counted.append(rank) or count(rank, facts))
    memory_by_device(facts_of(named(name, 1000, tp=2)))
    meshes = {"colocated": 1, "split": 2, "standalone": 3}[name]
    assert len(counted) <= 2 * 2 * meshes


def pipelines(flow, planned):
    """12 devices: the actor trains in 2 x 3 parts and generates in pairs; the critic shares its first six devices."""
    decode = [Placement("actor.generate", "decode", (at, at + 1), tp=2, after="drop") for at in range(0, 12, 2)]
    return Plan(
        "file",
        12,
        (
            Placement("actor.train", "train", tuple(range(6, 12)), tp=2, pp=3, after="offload"),
            Placement("critic.train", "train", tuple(range(6)), dp=3, tp=2, after="offload"),
            Placement("critic.values", "score", (0, 1, 2, 3), dp=2, tp=2),
            Placement("ref.logprobs", "score", tuple(range(12)), dp=12),
            *decode,
        ),
    )


@pytest.mark.parametrize("make_plan", [*(named(name, 12, tp) for name in NAMES for tp in (1, 2)), pipelines])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_devices_of_one_kind_hold_to_the_byte_what_each_holds_by_itself(make_plan, algorithm):
    if make_plan is pipelines and algorithm == "grpo":
        pytest.skip("has no critic")
    facts = facts_of(make_plan, algorithm)
    for ranks in facts.alike:
        first = device_memory._of_device(ranks[0], facts)
        for rank in ranks:
            alone = device_memory._of_device(rank, replace(facts))
            assert (alone.rows, alone.during) == (first.rows, first.during)

"""A search's memory and a dry run's are one forecast."""

from __future__ import annotations

import pytest

from plait.cost.call_memory import working_rows
from plait.cost.cluster import read_cluster
from plait.cost.held_parameters import parameter_rows
from plait.cost.model_costs import ModelCosts
from plait.cost.workload import Lengths, SampleLengths, Workload
from plait.schedule.plan import Placement, Plan
from tests.cost.test_many_devices import facts_of

SIZES = [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]


def plan_of(sizes):
    dp, tp, pp = sizes
    where = {"ranks": tuple(range(4)), "dp": dp, "tp": tp, "pp": pp}
    modes = {"train": "train", "generate": "decode"}

    def make(flow, planned):
        nodes = [node for node in flow.nodes if node.role in planned]
        return Plan("mine", 4, tuple(Placement(n.call, modes.get(n.asks, "score"), **where) for n in nodes))

    return make


@pytest.mark.parametrize("sizes", SIZES)
def test_weights_and_state(sizes):
    facts = facts_of(plan_of(sizes))
    layout = facts.places["critic"].train
    costs = costs_of(facts)
    state = ("critic: weights (bfloat16)", "critic: masters, moments and gradients")
    for role, trained, names in (("critic", True, state), ("ref", False, ("ref: weights (bfloat16)",))):
        held = [0] * sizes[2]
        for rank in range(4):
            rows, stage = dict(parameter_rows(rank, facts)), layout.coordinates(rank).pp
            held[stage] = max(held[stage], sum(rows[name] for name in names))
        assert costs.held_bytes(role, layout, trained=trained) == tuple(held)


@pytest.mark.parametrize("sizes", SIZES)
def test_what_calls_take(sizes):
    facts = facts_of(plan_of(sizes))
    costs = costs_of(facts)
    for one in facts.models:
        for rank in range(4):
            for (role, mode), rows in working_rows(rank, facts, one).items():
                layout = next(p.layout for p in facts.plan.placements if (p.call.split(".")[0], p.mode) == (role, mode))
                call = next(p.call for p in facts.plan.placements if (p.call.split(".")[0], p.mode) == (role, mode))
                found = costs.call(call, mode, layout).working_bytes[layout.coordinates(rank).pp]
                assert sum(count for _, count in rows) <= found
                if sizes[1] == 1:  # three key-value heads do not divide by two
                    assert found == sum(count for _, count in rows)


def costs_of(facts):
    lengths = SampleLengths(
        Lengths.fixed(facts.longest_tokens), Lengths.fixed(facts.recipe.sampling.max_response_tokens)
    )
    workload = Workload.of(facts.recipe, facts.flow, lengths)
    shapes = {one.role: facts.shapes[one.name] for one in facts.models}
    return ModelCosts(workload, shapes, facts.flow, read_cluster("4xA100-80G"), parameters=facts.parameters)

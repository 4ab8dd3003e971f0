"""Searches that give prompts devices of their own: where that is predicted to gain, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.cost.cluster_file import read_cluster
from plait.cost.costs import PROMPTS
from plait.cost.lengths import Lengths, SampleLengths
from plait.layout.mesh import Parallelism
from plait.planner import slot_divisions
from plait.planner.plan_objective import Objective
from plait.planner.plan_search import Budget
from plait.planner.plan_space import PlanSpace
from plait.planner.slot_divisions import LEAST_GAIN, MOST_IN_VAIN
from plait.recipes.recipe_file import load_recipe
from plait.runtime.prediction.choosing import searched
from plait.runtime.prediction.planning import Planning
from plait.runtime.prepare import outline
from plait.schedule.plan import Plan
from plait.simulator.places import Place
from tests.cases import examples

EXAMPLES = Path(__file__).parents[3] / "examples"
GRPO = {
    "model": "qwen2.5-1.5b",
    "algorithm": "grpo",
    "samples_per_prompt": 8,
    "micro_batch_tokens": 8192,
    "data.source": str(EXAMPLES / "prompts.jsonl"),
    "reward.functions": [str(EXAMPLES / "length_reward.py:brief")],
    "sampling.max_response_tokens": 1024,
    "sampling.max_running": 256,
    "device": "cuda",
}
LINKS = {
    "intra": {"gb_per_s": 450, "latency_us": 5},
    "inter": {"gb_per_s": 400, "latency_us": 10},
    "host": {"gb_per_s": 25, "latency_us": 10},
}
ALIKE, UNLIKE = ["H100", "H100"], ["H20", "H100"]
"""An H100 has seven times the products of an H20, and less memory bandwidth."""
LONG, SHORT = (
    SampleLengths(Lengths.fixed(16384), Lengths.fixed(128)),
    SampleLengths(Lengths.fixed(64), Lengths.fixed(128)),
)

Make = Callable[..., Planning]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Plannings on two nodes of two devices."""

    def planning(nodes: list[str], lengths: SampleLengths, **keys: object) -> Planning:
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump({"nodes": [{"count": 1, "devices": 2, "device": d} for d in nodes], **LINKS}))
        cluster = read_cluster(str(file))
        stated = {**GRPO, "prompts_per_step": 32, **keys}
        run = outline(load_recipe(None, list(stated.items())), device_memory=cluster.device.memory_bytes)
        return Planning(run.recipe, run.flow, run.models, run.shapes, cluster, lengths)

    return planning


def without(planning: Planning) -> Planning:
    """The same, where prompts have to be computed where samples are drawn."""
    roles = {role: replace(facts, prompts_apart=False) for role, facts in planning.space.problem.roles.items()}
    other = replace(planning)
    other.__dict__["space"] = PlanSpace(replace(planning.space.problem, roles=roles))
    return other


def generation(planning: Planning) -> int:
    return next(number for number, slot in enumerate(planning.graph.slots) if slot.mode == "decode")


def test_long_prompts_are_computed_on_the_devices_that_compute_faster(make: Make) -> None:
    """Drawing stays where memory is faster, and on rank 0. The plan is such as a run can follow."""
    planning = make(UNLIKE, LONG)
    budget = Budget(40)
    found, other = (searched(of, budget, 0).best for of in (planning, without(planning)))
    assert found is not None
    assert other is not None
    place = found.places[generation(planning)]
    assert {p.mode: p.ranks for p in place.placements} == {"decode": (0, 1), "prefill": (2, 3)}
    assert not any(place.is_apart for place in other.places)
    assert found.valued.value < 0.95 * other.valued.value
    forms = planning.space.forms.of(place.slot, (0, 1, 2, 3))
    assert sum(place.seconds) < (1 - LEAST_GAIN) * forms[0].seconds
    plan = planning.plan_of(found.places, "found")
    assert Plan.from_json(plan.to_json()) == plan
    assert planning.predict(plan).seconds_per_step == pytest.approx(found.valued.seconds, rel=0.05)


@pytest.mark.parametrize(("nodes", "lengths"), [(ALIKE, LONG), (UNLIKE, SHORT)])
def test_where_nothing_can_be_gained_a_search_tries_the_same_plans_as_without(
    nodes: list[str], lengths: SampleLengths, make: Make
) -> None:
    planning = make(nodes, lengths)
    found, other = (searched(of, Budget(12), 3) for of in (planning, without(planning)))
    assert (found.trace, found.evaluations) == (other.trace, other.evaluations)
    assert not any(place.is_apart for leader in found.leaders for place in leader.places)


def test_what_cannot_pay_is_not_played(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of all divisions say so."""
    planning = make(ALIKE, SHORT)
    monkeypatch.setattr(planning.space.divisions, "place", None)
    monkeypatch.setattr(planning.space.places, "place", None)
    assert [planning.space.divisions.of(generation(planning), mesh) for mesh in planning.space.meshes] == [()] * 7


@pytest.mark.parametrize(("most", "played"), [(256, MOST_IN_VAIN), (1, 1), (0, 0)])
def test_few_are_played_in_vain(make: Make, monkeypatch: pytest.MonkeyPatch, most: int, played: int) -> None:
    """Where bounds promise what no division keeps; and no more instances than a search may play."""
    monkeypatch.setattr(slot_divisions, "MOST_INSTANCES", most)
    planning = make(ALIKE, SHORT)
    space, slot, calls = planning.space, generation(planning), list[int]()
    monkeypatch.setattr(space.divisions, "bound_s", lambda draws, computes: 0.0)
    vain = space.place(slot, (0, 1, 2, 3), space.forms.of(slot, (0, 1, 2, 3))[0])

    def counted(slot: int, ranks: object, draw: int, drawing: Parallelism, prompts: Parallelism) -> Place:
        calls.append(drawing.dp)
        return vain

    monkeypatch.setattr(space.divisions, "played", counted)
    assert space.divisions.of(slot, (0, 1, 2, 3)) == ()
    assert len(calls) == played
    assert sum(calls) <= most


@pytest.mark.parametrize("keys", [{"max_staleness": 1, "partial_rollout": "recompute"}, {"sampling.engine": "vllm"}])
def test_prompts_stay_where_a_run_could_not_move_them(keys: dict[str, object], make: Make) -> None:
    planning = make(UNLIKE, LONG, **keys)
    slot = generation(planning)
    assert all(planning.space.divisions.of(slot, mesh) == () for mesh in planning.space.meshes)


def test_prompts_are_never_computed_on_rank_0(make: Make) -> None:
    """Nor is anything divided that scores or trains."""
    planning = make(UNLIKE, LONG)
    space = planning.space
    places = [
        place for slot in range(len(space.graph.slots)) for mesh in space.meshes for place in space.ways(slot, mesh)
    ]
    divided = [place for place in places if place.is_apart]
    assert divided
    assert {place.slot for place in divided} == {generation(planning)}
    assert all(0 not in p.ranks for place in divided for p in place.placements if p.mode == "prefill")
    seconds = [sum(place.seconds) for place in divided]
    assert seconds == sorted(seconds)


def test_what_would_lose_the_only_weights_is_offloaded_whichever_side_has_them(make: Make) -> None:
    """The side that computes prompts shares its parts with training. Its weights stay; the others may be dropped."""
    planning = make(UNLIKE, LONG)
    space, slot = planning.space, generation(planning)
    [first, *_] = space.divisions.of(slot, (0, 1, 2, 3))
    divided = space.divisions.place(slot, (0, 1, 2, 3), first, "drop")
    prompts = divided.placements[-1]
    train = space.graph.slots_of("actor")["train"]
    home = next(
        place
        for place in space.ways(train, prompts.ranks)
        if place.layouts[0].parallelism == prompts.layout.parallelism
    )
    places = [space.fastest(number, (0, 1, 2, 3)) for number in range(len(space.graph.slots))]
    places[slot], places[train] = divided, home
    lawful = space.lawful(places)
    assert [p.after for p in lawful[slot].placements] == ["drop", "offload"]
    planning.plan_of(lawful, "lawful")


@settings(deadline=None, max_examples=examples(4, 40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([ALIKE, UNLIKE]),
    st.sampled_from([256, 4096, 16384]),
    st.sampled_from([32, 512]),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([4, 32]),
    st.sampled_from(["auto", "off"]),
)
def test_a_division_takes_no_less_than_its_bound(
    make: Make, nodes, prompt, response, sigma, prompts, rebalance
) -> None:
    """But for the order in which samples follow each other, by which they may fit together better: half a percent.
    The bound of a whole plan holds as well."""
    responses = Lengths.lognormal(response, sigma, 2 * response) if sigma else Lengths.fixed(response)
    lengths = SampleLengths(Lengths.fixed(prompt), responses)
    keys = {"prompts_per_step": prompts, "sampling.max_running": 32, "rebalance": rebalance}
    planning = make(nodes, lengths, **keys)
    space, slot, whole = planning.space, generation(planning), (0, 1, 2, 3)
    objective = Objective(planning.space.problem)
    draws, computes = space.forms.of(slot, (0, 1))[0], space.forms.of(slot, (2, 3))[0]
    bound_s = space.divisions.bound_s(draws, computes)
    alone_s = draws.seconds - draws.asked.calls[0].terms[PROMPTS], computes.asked.calls[0].terms[PROMPTS]
    assert bound_s == max(alone_s)
    divided = space.divisions.played(slot, whole, 2, draws.parallelism, computes.parallelism)
    assert sum(divided.seconds) >= 0.995 * bound_s
    places = [space.fastest(number, whole) for number in range(len(space.graph.slots))]
    places[slot] = divided
    assert objective.bound(places) <= objective(places).value

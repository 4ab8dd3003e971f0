"""A search judges scoring on a training's ranks as a run has it where the training shards weights (ZeRO-3)."""

from __future__ import annotations

from random import Random

import pytest

from plait.cost.placement import planned_models
from plait.layout.mesh import Parallelism
from plait.planner.plan_moves import Moves, State
from plait.runtime.prediction.planning import Planning
from plait.schedule.completion import complete
from plait.schedule.plan import Plan
from plait.simulator.places import Place
from plait.simulator.steps import places_of
from tests.runtime.prediction.test_choosing import planning

SHARDS = {"optimizer.shard_weights": True}


def state_of(here: Planning, decode: Parallelism, **others: Parallelism) -> State:
    """All calls on two ranks, data parallel unless `others` says otherwise of a mode."""
    places = []
    for number, slot in enumerate(here.graph.slots):
        sizes = decode if slot.mode == "decode" else others.get(slot.mode, Parallelism(dp=2))
        form = here.space.forms.form_of(number, (0, 1), sizes)
        places.append(here.space.place(number, (0, 1), form))
    return here.space.lawful(places)


def completed(here: Planning, state: State) -> list[Place]:
    """The places of a plan as a run is given it."""
    plan = Plan("mine", here.cluster.num_devices, tuple(p for place in state for p in place.placements))
    planned = planned_models(here.recipe, here.models, here.shapes)
    return places_of(complete(plan, here.flow, planned, "mine"), here.space.places)


def sharing(here: Planning, state: State) -> set[str]:
    return {str(here.graph.slots[place.slot]) for place in state if place.has_shares}


def test_scores_take_the_shares_of_a_training_on_their_ranks() -> None:
    """Not of other roles, nor in another parallelism, nor where whole weights are there to generate with."""
    here = planning("2xA100-80G", **SHARDS)
    shared = state_of(here, Parallelism(tp=2))
    assert sharing(here, shared) == {"actor train", "actor score"}
    assert sharing(here, state_of(here, Parallelism(dp=2))) == {"actor train"}
    assert sharing(here, state_of(here, Parallelism(tp=2), score=Parallelism(tp=2))) == {"actor train"}
    score = here.graph.slots_of("actor")["score"]
    apart = [place if place.slot != score else here.space.place(score, (0, 1), _form(here, score)) for place in shared]
    assert not apart[score].has_shares
    assert here.space.lawful(apart) == shared


def _form(here: Planning, slot: int):
    return here.space.forms.form_of(slot, (0, 1), Parallelism(dp=2))


def test_on_a_shared_base_all_roles_that_score_there_do() -> None:
    here = planning("2xA100-80G", **SHARDS, **{"lora.rank": 8, "critic.model": None})
    found = sharing(here, state_of(here, Parallelism(tp=2)))
    assert {"actor train", "actor score", "ref score"} <= found


@pytest.mark.parametrize("keys", [{}, {"lora.rank": 8, "critic.model": None}], ids=["whole", "adapters"])
def test_what_a_search_values_is_what_a_run_is_given(keys: dict[str, object]) -> None:
    here = planning("4xA100-80G", **SHARDS, **keys)
    moves, rng, seen = Moves(here.space), Random("shares"), set()
    state = moves.greedy()
    assert state is not None
    for _ in range(150):
        state = moves.near(state, rng)
        if {rank for place in state for p in place.placements for rank in p.ranks} == set(range(4)):
            assert tuple(completed(here, state)) == state
            seen |= sharing(here, state)
    assert any(name.endswith("score") for name in seen)


def test_what_fits_with_shares_alone_is_a_form_of_scoring() -> None:
    """26 GB of a copy have no room in 24, and half of them have."""
    sizes = {}
    for name, keys in (("whole", {}), ("shared", SHARDS)):
        here = planning("2xRTX-4090", "llama-2-13b", **keys)
        score = here.graph.slots_of("actor")["score"]
        sizes[name] = {form.parallelism.dp for form in here.space.forms.of(score, (0, 1))}
    assert 2 not in sizes["whole"]
    assert 2 in sizes["shared"]

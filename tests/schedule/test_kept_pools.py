"""Where memory of generation stays between rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from plait.layout.mesh import Layout
from plait.schedule.kept_pools import keeps_memory, only_generates, pools_stay
from plait.schedule.placements import RolePlacement
from plait.schedule.plan import POOL, Placement, Plan, PolicyChoice
from tests.cost.test_device_memory import facts_of, named


def test_a_rank_may_generate_alone() -> None:
    """Two roles generate on ranks 1 to 3, of which rank 2 scores as well; rank 3 is both's."""
    one, two, three, zero = (Layout.on((rank,)) for rank in (1, 2, 3, 0))
    roles = {
        "actor": RolePlacement("actor", train=zero, generate=(zero, one, two, three)),
        "other": RolePlacement("other", train=one, generate=(three,)),
        "ref": RolePlacement("ref", score=two),
    }
    assert [only_generates(rank, roles, ("actor",)) for rank in range(4)] == [False, True, False, False]
    assert not only_generates(1, roles, ("actor", "other"))
    assert not only_generates(4, roles, ()), "it does nothing"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("says", [False, True])
def test_a_plan_says_it_of_all_gpus_that_generate(says: bool, device: str) -> None:
    """On rank 1 the actor generates alone; a CPU keeps its packed weights there, and nowhere else."""
    places = {"actor": RolePlacement("actor", train=Layout.on((0,)), generate=(Layout.on((0,)), Layout.on((1,))))}
    plan = Plan("mine", 2, policies=(PolicyChoice(POOL),) if says else ())
    found = [keeps_memory(rank, plan, places, ("actor",), device) for rank in (0, 1)]
    assert found == [says and device == "cuda", True]


def test_pools_stay_where_ranks_do_nothing_else_or_the_plan_says_so() -> None:
    train = Placement("actor.train", "train", (0,))
    apart = Plan("mine", 2, (train, Placement("actor.generate", "decode", (1,))))
    assert pools_stay(apart)
    beside = Plan("mine", 2, (train, Placement("actor.generate", "decode", (0, 1), dp=2)))
    assert not pools_stay(beside)
    assert pools_stay(replace(beside, policies=(PolicyChoice(POOL),)))
    assert not pools_stay(Plan("mine", 1, (train,))), "nothing is generated"
    twice = (*apart.placements, Placement("critic.generate", "decode", (1,)))
    assert not pools_stay(replace(apart, placements=twice)), "of two roles"
    again = (*apart.placements, Placement("actor.generate#2", "decode", (1,)))
    assert pools_stay(replace(apart, placements=again)), "by two calls of one role"


def actor_and_reference(ranks: tuple[int, ...]) -> Callable[..., Plan]:
    """Training and scoring on rank 0, generation on `ranks`."""
    train, score = Placement("actor.train", "train", (0,)), Placement("ref.logprobs", "score", (0,))
    generate = Placement("actor.generate", "decode", ranks, dp=len(ranks))
    return lambda flow, planned: Plan("mine", 3, (train, score, generate))


@pytest.mark.parametrize(
    ("make_plan", "stay"),
    [
        (actor_and_reference((1, 2)), True),
        (actor_and_reference((0, 1, 2)), False),
        (named("colocated", 4), False),
        (named("split", 4), False),
        (named("standalone", 4), False),
    ],
)
def test_what_is_said_of_a_plan_is_what_engines_do_on_every_rank_that_generates(make_plan, stay: bool) -> None:
    """Engines ask which models are trained, a plan says which roles train."""
    facts = facts_of(make_plan, "grpo")
    trained = [model.role for model in facts.models if model.trained]
    generating = [rank for layout in facts.places["actor"].generate for rank in layout.mesh.ranks]
    for says in (False, True):
        plan = replace(facts.plan, policies=(PolicyChoice(POOL),) if says else ())
        kept = [keeps_memory(rank, plan, facts.places, trained, "cuda") for rank in generating]
        assert pools_stay(plan) == all(kept) == (says or stay)

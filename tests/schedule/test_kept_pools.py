"""Where memory of generation stays between rollouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.layout.mesh import Layout
from plait.schedule.kept_pools import pools_stay
from plait.schedule.placements import RolePlacement, keeps_memory, only_generates
from plait.schedule.plan import POOL, Placement, Plan, PolicyChoice


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

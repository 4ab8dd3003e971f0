"""Which parts of a role's model lie in one memory, rank by rank."""

from __future__ import annotations

import pytest

from plait.cost.aliasing import Aliasing
from plait.cost.offload_policy import OffloadPolicy
from plait.layout.decoder import decoder_parameters
from plait.layout.mesh import Parallelism
from plait.layout.shards import shard
from plait.schedule.placements import WHOLE, part_key, placements_of
from plait.schedule.plan import Placement, Plan
from tests.cost.roles import ACTOR, REF, generate, train

LLAMA = decoder_parameters(
    layers=4, hidden=64, intermediate=96, heads=8, kv_heads=4, head_dim=8, vocabulary=96, cut_vocabulary=True
)


class Case:
    """What ranks hold of the actor, in elements."""

    def __init__(self, *placements: Placement, dtype: str = "bfloat16", adapted: bool = False, role: str = "actor"):
        plan = Plan("file", 1 + max(rank for p in placements for rank in p.ranks), placements)
        models = [one for one in (ACTOR, REF) if any(p.call.startswith(one.role) for p in placements)]
        idle = OffloadPolicy(models, plan, adapted=adapted)
        self.aliasing = Aliasing(models, plan, idle, dtype, lambda role: LLAMA)
        self.place = placements_of(plan, role)
        self.role = role

    def own(self, rank: int) -> dict[str, int]:
        """Layout of a rank → elements in the own buffer of its part; forecasts count as many."""
        found = {}
        for layout in self.place.layouts:
            if rank in layout.mesh.ranks:
                key = part_key(layout, rank)
                nest = self.aliasing.of(self.role, rank).get(key)
                at, sizes = layout.coordinates(rank), layout.parallelism
                alone = shard(LLAMA, sizes, at.tp, at.pp).num_elements
                found[str(layout)] = nest.own if nest else alone
                assert self.aliasing.own_elements(self.role, rank).get(key, alone) == found[str(layout)]
        return found


def size(tp: int = 1, rank: int = 0, pp: int = 1, stage: int = 0) -> int:
    return shard(LLAMA, Parallelism(tp=tp, pp=pp), rank, stage).num_elements


def test_a_rank_holds_the_larger_part_only() -> None:
    """HybridFlow's groups, tp 4 to two instances of tp 2: a half of the model, not three quarters."""
    case = Case(train((0, 1, 2, 3), tp=4), generate((0, 2, 1, 3), dp=2, tp=2))
    for rank in range(4):
        assert sorted(case.own(rank).values()) == [0, size(2, rank // 2)]


def test_what_is_not_inside_stays_apart() -> None:
    """In plain order ranks 1 and 2 train with a quarter of one half, and generate with the other."""
    case = Case(train((0, 1, 2, 3), tp=4), generate((0, 1, 2, 3), dp=2, tp=2))
    assert sum(case.own(0).values()) == size(2, 0)
    assert sum(case.own(1).values()) == size(4, 1) + size(2, 1)
    assert sum(case.own(2).values()) == size(4, 2) + size(2, 0)
    assert sum(case.own(3).values()) == size(2, 1)
    assert not case.aliasing.of("actor", 1)


def test_stages_and_replicas_lie_in_whole_models() -> None:
    case = Case(train((0, 1, 2, 3), dp=2, pp=2), generate((0, 1, 2, 3), dp=4))
    assert all(sorted(case.own(rank).values()) == [0, size()] for rank in range(4))
    case = Case(train((0, 1), tp=2), generate((0, 1), dp=2), Placement("actor.logprobs", "score", (1, 0), tp=2))
    assert all(sorted(case.own(rank).values()) == [0, 0, size()] for rank in (0, 1)), "either half is in the whole"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_that_are_masters_stay_one_buffer(dtype: str) -> None:
    case = Case(train((0, 1), tp=2), generate((0, 1), dp=2), dtype=dtype)
    assert all(sorted(case.own(rank).values()) == [size(2, rank), size()] for rank in (0, 1))
    case = Case(train((0, 1), dp=2), generate((0, 1), tp=2), dtype=dtype)
    assert all(sorted(case.own(rank).values()) == [0, size()] for rank in (0, 1)), "they host others"


@pytest.mark.parametrize(
    "places",
    [
        (train((0, 1), "offload", tp=2), generate((0, 1), dp=2)),
        (train((0, 1), tp=2), generate((0, 1), "drop", dp=2)),
    ],
)
def test_what_leaves_the_device_stays_apart(places: tuple[Placement, ...]) -> None:
    assert not any(Case(*places).aliasing.of("actor", rank) for rank in (0, 1))


def test_adapters_stay_apart() -> None:
    case = Case(train((0,)), generate((1,)), adapted=True)
    assert not case.aliasing.of("actor", 0)


def test_frozen_parts_lie_together() -> None:
    """In any dtype: nothing of them is a master."""
    score = Placement("ref.logprobs", "score", (0, 1), tp=2)
    case = Case(score, Placement("ref.generate", "decode", (0, 1), dp=2), dtype="float64", role="ref")
    assert all(sorted(case.own(rank).values()) == [0, size()] for rank in (0, 1))


def test_holdings_lie_where_the_parts_do() -> None:
    case = Case(train((0, 1, 2, 3), tp=4), generate((0, 2, 1, 3), dp=2, tp=2))
    home = case.aliasing.holdings("actor", case.place.home, range(4), LLAMA)
    for rank in range(4):
        (name,) = home.buffers[rank]
        instance = next(one for one in case.place.generate if rank in one.mesh.ranks)
        assert name == case.aliasing.name("actor", part_key(instance, rank))
        copy = case.aliasing.holdings("actor", instance, [rank], LLAMA)
        assert copy.buffers[rank] == home.buffers[rank] == {name: size(2, rank // 2)}
    assert case.aliasing.name("actor", part_key(case.place.home, 0)) == "weights0"
    assert WHOLE not in case.aliasing.of("actor", 0)

"""Published numbers: HybridFlow's volumes and groups (arXiv 2409.19256, table 2 and section 5), ReaL's meshes."""

from __future__ import annotations

from fractions import Fraction

import pytest

from plait.layout.caches import cache_parameters
from plait.layout.holdings import Holdings, weights
from plait.layout.mesh import Cluster, Layout, Mesh, Parallelism
from plait.layout.move import plan_move
from plait.layout.move_cost import Bandwidths, cost
from plait.layout.move_plan import MovePlan
from plait.layout.params import Param, Parameters
from plait.layout.regroup import regrouped
from tests.cases import slow_but
from tests.layout.nests import nested, num_bytes
from tests.layout.played_moves import played_seconds
from tests.layout.uniform_caches import uniform

NODES = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize(("smallest", "counts"), [(4, (3, 7, 18, 52, 168, 592)), (1, (15, 31, 66, 148, 360, 976))])
def test_legal_meshes(smallest: int, counts: tuple[int, ...]) -> None:
    found = tuple(sum(1 for _ in Cluster(nodes, 8).legal_meshes(smallest)) for nodes in NODES)
    assert found == counts


def test_options_per_call() -> None:
    """ReaL's: tp inside a node, and the devices of a stage are such as a mesh may have."""
    found = []
    for nodes in NODES:
        cluster = Cluster(nodes, 8)
        options = (sizes for mesh in cluster.legal_meshes(4) for sizes in Parallelism.all_of(len(mesh)))
        found.append(sum(sizes.tp in (1, 2, 4, 8) and cluster.is_legal_size(sizes.dp * sizes.tp) for sizes in options))
    assert found == [22, 58, 176, 620, 2464, 10448]


def model(elements: int, layers: int) -> Parameters:
    """Equal layers of one matrix each, cut by tensor parallelism."""
    return Parameters(tuple(Param(f"w{layer}", (64, elements // layers // 64), layer, 0) for layer in range(layers)))


SMALL = model(64 * 64 * 8, 8)


def resharding(train: Parallelism, generate_tp: int, regroup: bool) -> tuple[MovePlan, Holdings, Holdings]:
    """From a training layout to instances of `generate_tp` on the same ranks, 8 to a node."""
    size = train.size
    cluster = Cluster(max(1, size // 8), min(size, 8))
    source = weights(SMALL, Layout(Mesh(tuple(range(size))), train), "bfloat16", "training")
    target = Layout.on(range(size), dp=size // generate_tp, tp=generate_tp)
    if regroup:
        target = regrouped(target, SMALL, source, cluster)
    goal = weights(SMALL, target, "bfloat16", "generation")
    return plan_move(source, goal, cluster), source, goal


@pytest.mark.parametrize(
    ("train", "generate_tp", "regroup", "share"),
    [
        (Parallelism(tp=8), 2, True, Fraction(3, 8)),
        (Parallelism(tp=8), 2, False, Fraction(7, 16)),
        (Parallelism(tp=4), 2, True, Fraction(1, 4)),
        (Parallelism(tp=4), 2, False, Fraction(3, 8)),
        (Parallelism(dp=2, tp=8), 4, True, Fraction(1, 8)),
        (Parallelism(dp=2, tp=8), 4, False, Fraction(7, 32)),
        (Parallelism(pp=4, tp=8), 8, True, Fraction(3, 32)),
        (Parallelism(pp=4, tp=8), 8, False, Fraction(3, 32)),
        (Parallelism(pp=8, tp=8), 8, True, Fraction(7, 64)),
        (Parallelism(pp=8, tp=8), 8, False, Fraction(7, 64)),
    ],
)
def test_bytes_per_device(train: Parallelism, generate_tp: int, regroup: bool, share: Fraction) -> None:
    """What a device receives, as a share of the model: on average; with regrouping on every device."""
    plan, _, _ = resharding(train, generate_tp, regroup)
    whole = SMALL.num_elements * 2
    assert Fraction(plan.traffic.total_bytes, whole * train.size) == share
    if regroup:
        assert {Fraction(plan.traffic.received_bytes(rank), whole) for rank in range(train.size)} == {share}


@pytest.mark.parametrize(("tp", "generate_tp"), [(8, 2), (8, 4), (8, 1), (4, 2), (4, 4)])
def test_parameter_memory_is_that_of_the_generation_shard(tp: int, generate_tp: int) -> None:
    """Zero redundancy: with the training blocks as views the two layouts take M / t_g together."""
    _, source, goal = resharding(Parallelism(tp=tp), generate_tp, regroup=True)
    before, after = nested([source, goal])
    for rank in range(tp):
        assert before.buffers[rank] == after.buffers[rank]
        assert num_bytes(rank, after) == SMALL.num_elements * 2 // generate_tp


def test_generation_groups() -> None:
    """HybridFlow's example 1-4-2 with generation tp 2, ranks counted from 0: {0,2}, {1,3}, {4,6}, {5,7}."""
    source = weights(SMALL, Layout.on(range(8), dp=2, tp=4), "bfloat16")
    found = regrouped(Layout.on(range(8), dp=4, tp=2), SMALL, source, Cluster(1, 8))
    assert [instance.mesh.ranks for instance in found.instances()] == [(0, 2), (1, 3), (4, 6), (5, 7)]


@pytest.mark.parametrize(
    ("elements", "pp", "entering", "seconds"),
    slow_but([(34e9, 4, 51e9, 2.04)], [(70e9, 8, 122.5e9, 4.9), (34e9, 4, 51e9, 2.04)]),
)
def test_a_node_takes_in_what_it_lacks(elements: float, pp: int, entering: float, seconds: float) -> None:
    """70B and 34B, one stage per node of 8, to instances of tp 8, over 25 GB/s per node."""
    parameters = model(int(elements), pp)
    cluster = Cluster(pp, 8)
    source = weights(parameters, Layout.on(range(8 * pp), tp=8, pp=pp), "bfloat16", "training")
    target = weights(parameters, Layout.on(range(8 * pp), dp=pp, tp=8), "bfloat16", "generation")
    plan = plan_move(source, target, cluster, bucket_bytes=1 << 30)
    assert {into for _, into in plan.traffic.node_bytes.values()} == {entering}
    assert [out for out, _ in plan.traffic.node_bytes.values()] == pytest.approx([entering] * pp)
    free = Bandwidths(near=300e9, far=25e9, copy=1e12, near_latency=0.0, far_latency=0.0)
    assert cost(plan.traffic, free).bound == pytest.approx(seconds)
    assert played_seconds(plan, free) < 1.35 * seconds


def test_receivers_share_the_sending() -> None:
    """Two nodes of training, four others of generation: ReaL's broadcasts leave one node sending 4 M and the other
    nothing, where two could send 2 M each. With receivers forwarding, six nodes send two thirds of M each."""
    source = weights(SMALL, Layout.on(range(16), dp=2, tp=8), "bfloat16", "training")
    target = weights(SMALL, Layout.on(range(16, 48), dp=4, tp=8), "bfloat16", "generation")
    plan = plan_move(source, target, Cluster(6, 8), chunk_bytes=16)
    whole = SMALL.num_elements * 2
    assert plan.traffic.total_bytes == 4 * whole
    assert all(out <= 0.72 * whole for out, _ in plan.traffic.node_bytes.values())


@pytest.mark.parametrize(("layers", "heads", "per_token"), [(32, 32, 524288), (40, 40, 819200)])
def test_bytes_of_keys_and_values(layers: int, heads: int, per_token: int) -> None:
    shape = uniform(layers, heads, heads, key_dim=128, value_dim=128)
    elements = sum(param.num_elements for param in cache_parameters(shape, [1]))
    assert elements * 2 == per_token

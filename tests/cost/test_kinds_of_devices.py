"""Clusters of several kinds of devices: what ranks that wait for each other take, computed by hand on the machine of
`test_model_costs` and one that is half as fast in everything, with half the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from plait.cost.cluster import ClusterSpec, NodeKind
from plait.cost.cluster_file import read_cluster
from plait.cost.costs import CallCost
from plait.cost.decoding import decode_steps, levelled
from plait.cost.hardware import DEVICES, GIB, Device, Link
from plait.cost.layer_times import LayerTimes, Micro, total
from plait.cost.model_work import ModelWork
from plait.cost.moves import bandwidths, move_cost, offload_cost
from plait.cost.passes import Passes
from plait.cost.shape_parameters import parameters_of_shape
from plait.errors import ConfigError
from plait.layout.mesh import Layout, Mesh, Parallelism
from tests.cost.test_model_costs import DEVICE, SHAPE, SOFTWARE, WORK, a_cluster, costs_of

SLOW = Device("slow", DEVICE.flops / 2, DEVICE.memory_bytes // 2, DEVICE.memory_bandwidth / 2)
LINKS = Link(1e8, 1e-4), Link(1e7, 1e-3), Link(1e7, 0.0)
SLOW_LINKS = Link(5e7, 2e-4), Link(5e6, 2e-3), Link(5e6, 1e-3)
FAST_NODE, SLOW_NODE = NodeKind(1, DEVICE, *LINKS, 3.0), NodeKind(1, SLOW, *SLOW_LINKS, 1.0)


def mixed(*kinds: NodeKind, per_node: int = 2) -> ClusterSpec:
    return ClusterSpec.of_kinds(kinds or (FAST_NODE, SLOW_NODE), per_node, "mixed", SOFTWARE)


ALIKE = a_cluster(4, 2)
"""Two nodes of two devices, all as the fast ones."""
FAST, SLOWER = costs_of(WORK, ALIKE), costs_of(WORK, replace(mixed(SLOW_NODE, SLOW_NODE), nodes=2))
BOTH = costs_of(WORK, mixed())


def test_nodes_that_are_alike_are_a_cluster_of_one_kind() -> None:
    same = ClusterSpec.of_kinds([replace(FAST_NODE, nodes=2), FAST_NODE], 2, "same", SOFTWARE)
    assert (same.kinds, same.nodes, same.price_per_hour) == ((), 3, 18.0)
    assert same.among((0, 5)) is same
    assert same.stages_of(Layout.on(range(6), pp=3, tp=2)) == same.copies_of(Layout.on(range(6), dp=6)) == ()


def test_what_a_rank_has_and_what_several_have_together() -> None:
    cluster = mixed()
    assert [cluster.device_of(rank) for rank in range(4)] == [DEVICE, DEVICE, SLOW, SLOW]
    assert [cluster.memory_of(rank) for rank in (1, 2)] == [1 << 30, 1 << 29]
    assert cluster.price_per_hour == 2 * 3.0 + 2 * 1.0
    assert mixed(FAST_NODE, replace(SLOW_NODE, price_per_device_hour=None)).price_per_hour is None
    fast, slow, every = cluster.among((0, 1)), cluster.among((2,)), cluster.among((1, 2))
    assert (fast.device, fast.intra, fast.nodes, fast.kinds) == (DEVICE, LINKS[0], 2, ())
    assert (slow.device, slow.inter) == (SLOW, SLOW_LINKS[1])
    assert (every.device.flops, every.device.memory_bytes, every.host) == (SLOW.flops, 1 << 29, SLOW_LINKS[2])
    assert cluster.device == every.device
    assert cluster.kinds_of((0, 1)) == (0,)
    assert cluster.kinds_of((0, 1, 2, 3)) == (0, 1)


def test_stages_and_copies() -> None:
    cluster = mixed()
    fast, slow = cluster.among((0,)), cluster.among((2,))
    assert cluster.stages_of(Layout.on(range(4), pp=2, tp=2)) == (fast, slow)
    assert cluster.stages_of(Layout.on(range(4), dp=2, pp=2)) == ()  # every stage has a slow rank in one of the copies
    copies = cluster.copies_of(Layout.on(range(4), dp=4))
    assert [(copy.mesh.ranks, places) for copy, places in copies] == [((0,), (0, 1)), ((2,), (2, 3))]
    assert cluster.copies_of(Layout.on((0, 2, 1, 3), dp=2, pp=2)) == ()  # both copies are fast, then slow


@pytest.mark.parametrize("call", [("actor.generate", "decode"), ("actor.train", "train"), ("ref.logprobs", "score")])
def test_a_mesh_of_one_kind_takes_what_it_takes_in_a_cluster_of_that_kind(call) -> None:
    for sizes in ({"dp": 2}, {"tp": 2}, {"pp": 2}):
        fast, slow = Layout.on(range(2), **sizes), Layout.on(range(2, 4), **sizes)
        if call[1] == "decode":  # rows of slow ranks come from rank 0, over the slower link in both
            assert BOTH.call(*call, fast) == FAST.call(*call, fast)
        assert BOTH.call(*call, fast).seconds == FAST.call(*call, fast).seconds
        assert BOTH.call(*call, slow).seconds == SLOWER.call(*call, slow).seconds


@pytest.mark.parametrize("call", [("actor.train", "train"), ("ref.logprobs", "score"), ("actor.generate", "decode")])
def test_copies_wait_for_the_slowest(call) -> None:
    """Four copies have as many samples each: all takes what four slow ones take."""
    everywhere = Layout.on(range(4), dp=4)
    assert BOTH.call(*call, everywhere).seconds == pytest.approx(SLOWER.call(*call, everywhere).seconds)
    assert BOTH.call(*call, everywhere).seconds > FAST.call(*call, everywhere).seconds


def test_instances_of_a_generation_end_each_when_its_devices_have() -> None:
    everywhere = Layout.on(range(4), dp=4)
    both, fast, slow = (costs.call("actor.generate", "decode", everywhere) for costs in (BOTH, FAST, SLOWER))
    assert isinstance(both, CallCost)
    assert both.instance_seconds[:2] == pytest.approx(fast.instance_seconds[:2])
    assert both.instance_seconds[2:] == pytest.approx(slow.instance_seconds[2:])


def test_each_stage_takes_what_its_own_devices_take() -> None:
    """Two stages of two layers: the second, with the head, takes twice as long on devices that are half as fast."""
    cluster, layout, work = mixed(), Layout.on(range(4), pp=2, tp=2), ModelWork(SHAPE, "bfloat16", 1000)
    stages = [LayerTimes(stage, work, layout) for stage in cluster.stages_of(layout)]
    both = Passes(LayerTimes(cluster, work, layout), stages)
    fast, slow = (Passes(LayerTimes(cluster.among((rank,)), work, layout)) for rank in (0, 2))
    micro = Micro(96, 1000, 96)
    assert both.forward(micro, 0) == fast.forward(micro, 0)
    assert both.backward(micro, 1) == slow.backward(micro, 1)
    assert slow.forward(micro, 1)["products"] == 2 * fast.forward(micro, 1)["products"]
    rows = np.array([4.0]), np.array([100.0]), np.array([1.0])
    one, other = fast.times.decode_layer(4, 100), slow.times.decode_layer(4, 100)
    hops = 2 * both.times.traffic.hop(4 * 64 * 2)
    expected = 2 * total(one) + 2 * total(other) + slow.times.head(4) + hops
    assert decode_steps(both, *rows).tolist() == pytest.approx([expected])


def test_layers_go_by_the_speed_of_stages() -> None:
    (fast, _), (slow, _) = BOTH.stage_works("actor.train", "train", Layout.on(range(4), pp=2, tp=2))
    assert fast / slow == pytest.approx(2.0, rel=0.05)
    assert BOTH.stage_works("actor.train", "train", Layout.on(range(4), dp=2, pp=2)) == ()


def test_levelled_instances_do_all_work_at_the_speed_of_all() -> None:
    """4 s of work at speed 2 and 6 s at speed 1 are 14 at speed 3; but who ends last may have to wait for it."""
    assert levelled((4.0, 6.0), 0.0, (2.0, 1.0)) == pytest.approx(14 / 3)
    assert levelled((4.0, 6.0), 5.5, (2.0, 1.0)) == 5.5
    assert levelled((4.0, 6.0), 7.0, (2.0, 1.0)) == 6.0, "no later than without it"


def test_copies_to_the_host_and_moves_take_the_slowest_link() -> None:
    cluster, layout = mixed(), Layout.on(range(4), pp=2, tp=2)
    assert offload_cost(cluster, layout, (100, 10)).seconds == max(100 / 5e6, 1e-3 + 10 / 2.5e6)
    source, target = Layout.on(range(2), tp=2), Layout.on(range(2, 4), tp=2)
    parameters = parameters_of_shape(SHAPE)
    every = cluster.among(range(4))
    assert BOTH.move("actor", source, target) == move_cost(parameters, source, target, "bfloat16", every)
    assert bandwidths(every).far == 5e6 * 0.5


KINDS = """
nodes:
  - {count: 1, devices: 8, device: H100, inter: {gb_per_s: 400, latency_us: 10}, price_per_device_hour: 2.5}
  - {count: 2, devices: 8, device: A100-80G, inter: {gb_per_s: 200, latency_us: 10}}
intra: {gb_per_s: 300, latency_us: 5}
host: {gb_per_s: 25, latency_us: 10}
price_per_device_hour: 1.5
"""


def write(folder: Path, text: str) -> str:
    path = folder / "kinds.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_lists_nodes_of_several_kinds(tmp_path: Path) -> None:
    found = read_cluster(write(tmp_path, KINDS))
    assert (found.num_devices, found.nodes, found.name) == (24, 3, "kinds")
    assert [found.device_of(rank).name for rank in (7, 8, 23)] == ["H100", "A100-80G", "A100-80G"]
    assert [kind.inter.bandwidth for kind in found.kinds] == [400e9, 200e9]
    assert found.kinds[1].intra == Link(300e9, 5e-6)
    assert found.price_per_hour == 8 * 2.5 + 16 * 1.5
    assert (found.device.flops, found.device.memory_bytes) == (DEVICES["A100-80G"].flops, 80 * GIB)
    assert read_cluster(write(tmp_path, KINDS), 16).price_per_hour == 8 * 2.5 + 8 * 1.5
    assert read_cluster(write(tmp_path, KINDS), 8).kinds == ()
    assert read_cluster(write(tmp_path, KINDS), 4).device == DEVICES["H100"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("devices: 8, device: H100", "devices: 4, device: H100"),
            "expected as many `devices` in each node, found 4, 8",
        ),
        (("device: H100", "device: H10"), r"key `nodes\.0\.device`: expected one of .*did you mean `H"),
        (("device: A100-80G,", ""), r"key `nodes\.1\.device` is missing"),
        (("intra: {gb", "# intra: {gb"), r"key `nodes\.0\.intra` is missing; state it there, or `intra` for all nodes"),
        (("{count: 1,", "{cuont: 1,"), r"unknown key `nodes\.0\.cuont`; did you mean `count`"),
        (("inter: {gb_per_s: 200,", "inter: {gb: 200,"), r"unknown key `nodes\.1\.inter\.gb`"),
        (("host: {", "device: H100\nhost: {"), "key `device`: where `nodes` is a list, each of its entries says it"),
        (("count: 2", "count: 4000"), "at most 4096 devices"),
        (("count: 2", "count: 0"), r"key `nodes\.1\.count`: .*found 0"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_cluster(write(tmp_path, KINDS.replace(*change)))


def test_more_nodes_than_are_listed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at most 24, as its nodes are of several kinds, found 32"):
        read_cluster(write(tmp_path, KINDS), 32)


def test_ranks_of_a_mesh_may_have_any_order() -> None:
    cluster = mixed()
    layout = Layout(Mesh((2, 0, 3, 1)), Parallelism(2, 1, 2))
    assert cluster.stages_of(layout) == (cluster.among((2,)), cluster.among((0,)))

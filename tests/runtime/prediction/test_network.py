"""What a plan counts of other machines: measured links and the least memory, or a stated assumption."""

from __future__ import annotations

from plait.cost.cluster import ClusterSpec
from plait.cost.hardware import Device, Link
from plait.runtime.prediction.network import UNKNOWN, Network

NEAR, HOST = Link(1e9, 1e-4), Link(1e9, 0.0)
HERE = ClusterSpec(1, 2, Device("cpu", 1e9, 8 << 30, 1e9), NEAR, HOST, HOST, name="this machine")


def test_links_between_nodes_are_those_that_were_measured() -> None:
    found = Network(Link(2e8, 3e-4), 6 << 30).joins(HERE, 3, "cpu")
    assert (found.nodes, found.num_devices, found.inter, found.intra) == (3, 6, Link(2e8, 3e-4), NEAR)
    assert found.device.memory_bytes == 3 << 30  # two processes share the least machine's
    assert Network(Link(2e8, 3e-4), 6 << 30).joins(HERE, 3, "cuda").device.memory_bytes == 8 << 30
    assert "measured over TCP, 0.2 GB/s and 300 us" in Network(Link(2e8, 3e-4)).label


def test_what_was_not_measured_is_said() -> None:
    assert Network().joins(HERE, 2, "cpu").inter == UNKNOWN
    assert "not measured, taken as 0.12 GB/s and 500 us" in Network().label

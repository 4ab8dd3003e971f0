"""Messages of layouts over two nodes of four devices, by hand."""

from __future__ import annotations

import pytest

from plait.cost.traffic import Traffic
from plait.layout.mesh import Layout
from tests.cost.test_model_costs import a_cluster

NEAR, FAR = 1e-4, 1e-3
"""Latencies; half of 1e8 and of 1e7 bytes a second is had of links within and between nodes."""


def traffic(dp: int, tp: int, pp: int = 1) -> Traffic:
    return Traffic(a_cluster(8, nodes=2), Layout.on(range(dp * tp * pp), dp, tp, pp))


def test_groups_that_leave_a_node_share_its_link() -> None:
    """Of dp 2 and tp 4 all four pairs along dp do; of dp 4 and tp 2 both groups of four."""
    assert traffic(2, 4).all_reduce("tp", 1e6) == pytest.approx(NEAR + 2 * 3 / 4 * 1e6 / 0.5e8)
    assert traffic(2, 4).gather("dp", 1e6) == pytest.approx(FAR + 4 * 1 / 2 * 1e6 / 0.5e7)
    assert traffic(4, 2).all_reduce("dp", 1e6) == pytest.approx(FAR + 2 * 2 * 3 / 4 * 1e6 / 0.5e7)
    assert traffic(1, 8).all_reduce("dp", 1e6) == 0.0
    assert traffic(1, 8).all_reduce("tp", 1e6) == pytest.approx(FAR + 2 * 7 / 8 * 1e6 / 0.5e7)


def test_hops_between_nodes_are_those_of_one_stage() -> None:
    """Four devices send to the other node, or two, the middle one of three hops; within nodes each has its own link."""
    assert traffic(1, 4, 2).hop(1e6) == pytest.approx(FAR + 4 * 1e6 / 0.5e7)
    assert traffic(1, 2, 4).hop(1e6) == pytest.approx(FAR + 2 * 1e6 / 0.5e7)
    assert traffic(2, 2, 2).hop(1e6) == pytest.approx(NEAR + 1e6 / 0.5e8)
    assert traffic(2, 4).hop(1e6) == 0.0

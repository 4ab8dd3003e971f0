"""What a device and a node lack: published shares, and by hand."""

from __future__ import annotations

import pytest

from plait.cost.move_bound import lacking
from plait.layout.mesh import Layout


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        (Layout.on(range(8), tp=8), Layout.on(range(8), dp=4, tp=2), 7 / 16),
        (Layout.on(range(4), tp=4), Layout.on(range(4), dp=2, tp=2), 3 / 8),
        (Layout.on(range(32), tp=8, pp=4), Layout.on(range(32), dp=4, tp=8), 3 / 32),
        (Layout.on(range(64), tp=8, pp=8), Layout.on(range(64), dp=8, tp=8), 7 / 64),
    ],
)
def test_shares_of_a_model_as_published(source: Layout, target: Layout, share: float) -> None:
    """HybridFlow's groups of consecutive ranks: 7/16 and 3/8; 3/32 and 7/64 of those over nodes."""
    devices, _ = lacking(64, source, target, 8)
    assert devices.sum() / len(target.mesh) == pytest.approx(share)


def test_a_device_that_has_nothing_lacks_all() -> None:
    devices, nodes = lacking(4, Layout.on((0,)), Layout.on((1,)), 1)
    assert list(devices) == list(nodes) == [0.0, 1.0]


def test_each_node_takes_in_what_none_of_its_devices_has() -> None:
    """A stage of a 70B model on each of 8 nodes: 7/8 of it comes into each."""
    _, nodes = lacking(64, Layout.on(range(64), tp=8, pp=8), Layout.on(range(64), dp=8, tp=8), 8)
    assert nodes == pytest.approx([7 / 8] * 8)
    _, same = lacking(64, Layout.on(range(8), tp=8), Layout.on(range(8), dp=8), 8)
    assert same == pytest.approx([0.0])

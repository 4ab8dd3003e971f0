"""What moving samples takes, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.cluster import ClusterSpec
from plait.cost.hardware import Device, Link, Software
from plait.cost.sample_moves import sample_move_times
from plait.layout.mesh import Layout
from plait.models.shape import ModelShape

SHAPE = ModelShape(
    layers=2,
    hidden=8,
    intermediate=16,
    heads=2,
    kv_heads=1,
    head_dim=4,
    vocabulary=100,
    tied=True,
    max_positions=64,
    attention_parameters=8 * 4 * (2 * 2 + 2 * 1),
)
CLUSTER = ClusterSpec(
    1,
    4,
    Device("one", 1e6, 1 << 30, 1e9),
    Link(1000.0, 0.5),
    Link(100.0, 2.0),
    Link(1.0, 0.0),
    software=Software(products=0.5, links=0.8),
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_times_of_a_move(ranks: int) -> None:
    """A token has 2 x 2 layers x 4 numbers of 2 bytes; a prefill 2 x 2 layers x (192 + 384) operations."""
    instance = Layout.on(tuple(range(ranks)), tp=ranks)
    times = sample_move_times(SHAPE, "bfloat16", instance, CLUSTER)
    assert (times.token_bytes, times.setup_s, times.bytes_per_s) == (32, 0.5, 800.0 * ranks)
    assert times.prefill_token_s == pytest.approx(2 * 2 * (192 + 3 * 8 * 16) / (0.5e6 * ranks))
    slower = replace(CLUSTER.intra, bandwidth=CLUSTER.intra.bandwidth / 4)
    by_messages = sample_move_times(SHAPE, "bfloat16", instance, replace(CLUSTER, messages=slower))
    assert (by_messages.setup_s, by_messages.bytes_per_s) == (0.5, 200.0 * ranks), "not by sums"
    far = sample_move_times(SHAPE, "bfloat16", instance, replace(CLUSTER, nodes=2))
    assert (far.setup_s, far.bytes_per_s) == (2.0, 80.0), "shared by the node"

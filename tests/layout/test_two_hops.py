"""New weights go from the masters to the training's layout, then on to others: as few bytes as at once."""

from __future__ import annotations

import pytest

from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import merged, weights, zero_shards
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move

MODEL = decoder_parameters(
    layers=4, hidden=64, intermediate=176, heads=8, kv_heads=4, head_dim=8, vocabulary=321, cut_vocabulary=True
)


@pytest.mark.parametrize(
    ("training", "generation"),
    [
        (Layout.on(range(4), dp=4), Layout.on(range(4), dp=4)),
        (Layout.on(range(4), dp=2, tp=2), Layout.on(range(4), dp=4)),
        (Layout.on(range(4), tp=4), Layout.on(range(4), dp=2, tp=2)),
        (Layout.on(range(4), dp=2, pp=2), Layout.on(range(4), dp=2, tp=2)),
        (Layout.on(range(2), dp=2), Layout.on(range(2, 6), dp=2, tp=2)),
        (Layout.on(range(4), dp=2, tp=2), Layout.on(range(2, 6), dp=4)),
    ],
    ids=str,
)
def test_two_hops_receive_what_one_would(training: Layout, generation: Layout) -> None:
    """Per rank: its share of the masters does not travel, all else of both of its blocks does, once."""
    cluster = Cluster(1, 6)
    masters = zero_shards(MODEL, training, "float32")
    own, other = weights(MODEL, training, "bfloat16", "own"), weights(MODEL, generation, "bfloat16", "other")
    first, second = plan_move(masters, own, cluster), plan_move(own, other, cluster)
    at_once = plan_move(masters, merged([own, other]), cluster)
    for rank in range(6):
        assert first.received_bytes(rank) + second.received_bytes(rank) == at_once.received_bytes(rank)
    assert sum(map(at_once.received_bytes, range(6))) > 0

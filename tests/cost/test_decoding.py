"""A step of decoding in stages, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.decoding import Decoding
from plait.cost.layer_times import LayerTimes, total
from plait.cost.model_work import ModelWork
from plait.cost.passes import Passes
from plait.layout.mesh import Layout
from tests.cost.test_model_costs import HEAD, LAYER, SHAPE, SOFTWARE, a_cluster


def test_a_round_is_the_way_through_stages_and_hops_or_the_slowest_stages_work() -> None:
    """Four samples of 250 tokens. A hop takes 0.25 s beside its message, far more than stages: two groups wait for it.
    Without it the last stage, with the head, is busy all the time: twice."""
    layout = Layout.on(range(2), pp=2)

    def terms(hop_s: float, groups: int) -> dict[str, float]:
        cluster = a_cluster(2, software=replace(SOFTWARE, hop_s=hop_s))
        passes = Passes(LayerTimes(cluster, ModelWork(SHAPE, "bfloat16", 1000), layout))
        return Decoding(passes, 8.0, lambda running: groups).step(4, 4 * 242)

    for groups in (1, 2):
        layer = (2 * LAYER + 2 * 1000 / groups * 64 * 2) / 0.5e8
        found = terms(0.25, groups)
        assert found["hops"] == pytest.approx(2 * (1e-4 + 4 / groups * 64 * 2 / 0.5e8 + 0.25))
        assert total(found) == pytest.approx(4 * layer + 2 * HEAD / 0.5e8 + found["hops"])
    busy = terms(0.0, 2)
    assert "hops" not in busy
    assert total(busy) == pytest.approx(2 * (2 * layer + 2 * HEAD / 0.5e8))

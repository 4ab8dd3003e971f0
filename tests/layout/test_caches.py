"""Keys and values move by the same planner as weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import LayoutError
from plait.layout.caches import cache, cache_parameters
from plait.layout.mesh import Cluster, Layout
from tests.cases import examples
from tests.layout.judge import judge
from tests.layout.uniform_caches import uniform

CLUSTER = Cluster(2, 4)


@settings(max_examples=examples(30, 60), deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_caches_between_instances(groups: int, layers: int, data) -> None:
    """A sample that migrates takes its keys and values along, re-split by heads and by layers, and where its tokens
    went, which all ranks of tp have; some layers keep none."""
    shape = uniform(layers, 4 * groups, groups, key_dim=3, value_dim=2)
    experts = data.draw(st.lists(st.integers(0, 2), min_size=layers, max_size=layers))
    shape = replace(shape, layers=tuple(map(lambda layer, top_k: replace(layer, experts=top_k), shape.layers, experts)))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    params = cache_parameters(shape, lengths)
    held = []
    for name in ("before", "after"):
        instances = []
        for _ in lengths:
            tp = data.draw(st.integers(1, min(4, 4 * groups)))
            pp = data.draw(st.integers(1, min(2, layers)))
            first = data.draw(st.integers(0, 8 - tp * pp))
            instances.append(Layout.on(range(first, first + tp * pp), tp=tp, pp=pp))
        held.append(cache(params, shape, instances, "bfloat16", name))
    judge(*held, CLUSTER)


def test_an_instance_that_holds_a_sample_whole() -> None:
    shape = uniform(layers=2, heads=4, groups=2, key_dim=8, value_dim=8)
    params = cache_parameters(shape, [5])
    held = cache(params, shape, [Layout.on(range(4), tp=4)], "bfloat16")
    assert [sum(h.box.num_elements for h in held.ranks[rank]) for rank in range(4)] == [2 * 5 * 16] * 4
    with pytest.raises(LayoutError, match="dp: expected an instance"):
        cache(params, shape, [Layout.on(range(2), dp=2)], "bfloat16")

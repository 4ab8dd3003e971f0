"""The order of ranks that keeps the most."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.layout.holdings import weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.move import plan_move
from plait.layout.regroup import assign, regrouped
from tests.cases import examples
from tests.layout.cases import pairs
from tests.layout.test_golden import SMALL


@given(st.integers(1, 5), st.data())
def test_assignment_is_the_best_of_all(size: int, data) -> None:
    numbers = data.draw(st.lists(st.integers(-9, 9), min_size=size * size, max_size=size * size))
    gain = np.array(numbers, dtype=np.float64).reshape(size, size)
    chosen = assign(gain)
    assert sorted(chosen) == list(range(size))
    best = max(sum(gain[row, columns[row]] for row in range(size)) for columns in permutations(range(size)))
    assert sum(gain[row, chosen[row]] for row in range(size)) == best


@settings(max_examples=examples(20, 40), deadline=None)
@given(pairs())
def test_never_moves_more_than_the_given_order(case) -> None:
    parameters, cluster, before, after = case
    source = weights(parameters, before, "float32", "before")
    found = regrouped(after, parameters, source, cluster)
    assert sorted(found.mesh.ranks) == sorted(after.mesh.ranks)
    assert found.parallelism == after.parallelism
    moved = [
        plan_move(source, weights(parameters, layout, "float32", "after"), cluster).traffic.total_bytes
        for layout in (found, after)
    ]
    assert moved[0] <= moved[1]
    same_node = zip(found.mesh.ranks, after.mesh.ranks, strict=True)
    assert all(cluster.node_of(mine) == cluster.node_of(given) for mine, given in same_node)


def test_the_own_layout_stays_as_it_is() -> None:
    layout = Layout.on(range(8), dp=2, tp=2, pp=2)
    source = weights(SMALL, layout, "float32")
    assert regrouped(layout, SMALL, source, Cluster(1, 8)) == layout

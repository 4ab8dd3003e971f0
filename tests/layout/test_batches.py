"""Rows, keys and values move by the same planner as weights."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import LayoutError
from plait.layout.batches import CacheShape, Spread, cache, cache_parameters, row_parameters, rows
from plait.layout.mesh import Cluster, Layout, Parallelism
from tests.layout.judge import judge

CLUSTER = Cluster(2, 4)
SPREADS = [
    Spread(("dp",)),
    Spread(("dp",), tp=0, pp=-1),
    Spread(("dp", "pp", "tp")),
    Spread(()),
    Spread(("pp",), dp=0, tp=0),
    Spread(("dp", "pp")),
]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    size = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    first = draw(st.integers(0, 8 - size))
    sizes = draw(st.sampled_from(list(Parallelism.all_of(size))))
    return Layout.on(range(first, first + size), sizes.dp, sizes.tp, sizes.pp)


@settings(max_examples=80, deadline=None)
@given(layouts(), layouts(), st.lists(st.integers(0, 20), max_size=12), st.data())
def test_rows_between_calls(before: Layout, after: Layout, num_bytes: list[int], data) -> None:
    """Any number of rows, of any length, over any number of slots: nothing is padded."""
    params = row_parameters(num_bytes)
    held = []
    for layout, name in ((before, "before"), (after, "after")):
        spread = data.draw(st.sampled_from(SPREADS))
        slots = st.integers(0, spread.num_slots(layout) - 1)
        slot_of = data.draw(st.lists(slots, min_size=len(params), max_size=len(params)))
        held.append(rows(params, layout, spread, slot_of, name))
    judge(*held, CLUSTER)


def test_the_named_protocols() -> None:
    layout = Layout.on(range(8), dp=2, tp=2, pp=2)
    slots = [spread.slots(layout) for spread in SPREADS]
    assert slots[0] == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1, 7: 1}
    assert slots[1] == {2: 0, 6: 1}
    assert slots[2] == {rank: rank for rank in range(8)}
    assert slots[3] == dict.fromkeys(range(8), 0)
    assert slots[4] == {0: 0, 2: 1}
    assert slots[5] == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}


@pytest.mark.parametrize("spread", [Spread(("dp",), dp=0), Spread((), tp=2), Spread((), pp=-3)])
def test_a_spread_that_does_not_fit_is_refused(spread: Spread) -> None:
    with pytest.raises(LayoutError, match=r"^(dp|tp|pp): expected one of 2 coordinates"):
        spread.slots(Layout.on(range(8), dp=2, tp=2, pp=2))


def test_rows_in_a_slot_that_is_not_there_are_refused() -> None:
    with pytest.raises(LayoutError, match="slot_of: expected a slot from 0 to 1 for each of 2 rows"):
        rows(row_parameters([3, 4]), Layout.on(range(2), dp=2), SPREADS[0], [0, 2])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_caches_between_instances(groups: int, layers: int, data) -> None:
    """A sample that migrates takes its keys and values along, re-split by heads and by layers."""
    shape = CacheShape.uniform(layers, 4 * groups, groups, key_dim=3, value_dim=2)
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
    shape = CacheShape.uniform(layers=2, heads=4, groups=2, key_dim=8, value_dim=8)
    params = cache_parameters(shape, [5])
    held = cache(params, shape, [Layout.on(range(4), tp=4)], "bfloat16")
    assert [sum(h.box.num_elements for h in held.ranks[rank]) for rank in range(4)] == [2 * 5 * 16] * 4
    with pytest.raises(LayoutError, match="dp: expected an instance"):
        cache(params, shape, [Layout.on(range(2), dp=2)], "bfloat16")

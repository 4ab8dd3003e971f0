"""Keys and values of samples as holdings: instances of any shape, models whose layers differ."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.generation.transfer import holdings, parts
from plait.layout.caches import CacheShape, LayerCache
from plait.layout.mesh import Cluster, Layout, Mesh, Parallelism
from tests.layout.judge import judge

CLUSTER = Cluster(2, 8)


@st.composite
def shapes(draw: st.DrawFn) -> CacheShape:
    """Layers of unequal heads and head sizes, some without keys and values; gathered or cut."""
    heads, num_layers, cut = 8, draw(st.integers(1, 5)), draw(st.booleans())
    layers = [
        LayerCache(layer, draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 4)), draw(st.integers(1, 4)), cut)
        for layer in range(num_layers)
        if draw(st.integers(0, 4))
    ]
    return CacheShape(num_layers, heads, tuple(layers))


@st.composite
def instances(draw: st.DrawFn, num_layers: int) -> Layout:
    tp, pp = draw(st.integers(1, 8)), draw(st.integers(1, min(2, num_layers)))
    ranks = draw(st.permutations(range(16)))[: tp * pp]
    first = draw(st.integers(1, max(1, num_layers - 1)))
    return Layout(Mesh(tuple(ranks)), Parallelism(1, tp, pp, (first, num_layers - first) if pp == 2 else ()))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_each_rank_gets_what_it_lacks(data: st.DataObject) -> None:
    """Exactly that, each element once, whatever both instances are; and the buffer of several ranges is those of each
    behind one another."""
    shape = data.draw(shapes())
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    source, target = (data.draw(instances(shape.num_layers)) for _ in range(2))
    before, after = (holdings(shape, lengths, one, "float32", name) for one, name in ((source, "from"), (target, "to")))
    judge(before, after, CLUSTER)
    for rank in target.mesh.ranks:
        size = after.buffers.get(rank, {}).get("to", 0)
        flats = parts(after, shape, len(lengths), rank, torch.arange(size))
        alone = [holdings(shape, [length], target, "float32").buffers.get(rank, {}).get("kv", 0) for length in lengths]
        assert [len(flat) for flat in flats] == alone
        assert torch.cat(flats).tolist() == list(range(size))

"""Which rank holds which block: by hand, as properties, and what is refused."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import LayoutError
from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import weights, zero_shards
from plait.layout.mesh import Cluster, Layout, Mesh, Parallelism
from plait.layout.params import Block, FlatLayout, Heads, Param, Parameters
from plait.layout.shards import balanced_stages, check, check_instances, shard, stage_bounds, stages_of, zero_range
from tests.layout.nests import num_bytes

SMALL = decoder_parameters(layers=3, hidden=4, intermediate=6, heads=4, kv_heads=2, head_dim=2, vocabulary=11)
TIED = decoder_parameters(
    layers=3, hidden=4, intermediate=6, heads=4, kv_heads=2, head_dim=2, vocabulary=11, tied=True, cut_vocabulary=True
)


def test_ranks_are_counted_dp_then_pp_then_tp() -> None:
    layout = Layout.on(range(10, 22), dp=2, tp=3, pp=2)
    assert [layout.rank_at(0, tp, 0) for tp in range(3)] == [10, 11, 12]
    assert layout.rank_at(0, 0, 1) == 13
    assert layout.rank_at(1, 0, 0) == 16
    assert all(layout.rank_at(c.dp, c.tp, c.pp) == rank for rank in range(10, 22) for c in [layout.coordinates(rank)])
    assert [instance.mesh.ranks for instance in layout.instances()] == [tuple(range(10, 16)), tuple(range(16, 22))]


@pytest.mark.parametrize(
    ("heads", "ways", "query", "shared"),
    [
        (Heads(8, 8), 4, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (Heads(8, 2), 4, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
        # SmolLM2-135M: 9 heads in 3 groups; whole groups for 2 ranks, one divided group for 4.
        (Heads(9, 3), 2, [(0, 3), (3, 9)], [(0, 1), (1, 3)]),
        (Heads(9, 3), 4, [(0, 3), (3, 6), (6, 7), (7, 9)], [(0, 1), (1, 2), (2, 3), (2, 3)]),
        (Heads(9, 3), 9, [(i, i + 1) for i in range(9)], [(i // 3, i // 3 + 1) for i in range(9)]),
    ],
)
def test_heads_by_hand(heads: Heads, ways: int, query: list, shared: list) -> None:
    groups = Heads(heads.heads, heads.groups, shared=True)
    assert [heads.part_range(index, ways) for index in range(ways)] == query
    assert [groups.part_range(index, ways) for index in range(ways)] == shared


@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_every_rank_has_heads_and_just_their_keys(groups: int, per_group: int, data) -> None:
    heads, ways = Heads(groups * per_group, groups), data.draw(st.integers(1, groups * per_group))
    keys, end = Heads(heads.heads, groups, shared=True), 0
    for index in range(ways):
        first, stop = heads.part_range(index, ways)
        assert first == end < stop
        end = stop
        assert keys.part_range(index, ways) == (first // per_group, (stop - 1) // per_group + 1)
        one_group = first // per_group == (stop - 1) // per_group
        assert one_group or first % per_group == stop % per_group == 0, "unequal heads per key"
    assert end == heads.heads


def test_sizes_need_not_divide() -> None:
    vocabulary = Param("head", (49153, 3), cut=0)
    assert [vocabulary.tp_range(index, 4) for index in range(4)] == [
        (0, 12288),
        (12288, 24576),
        (24576, 36864),
        (36864, 49153),
    ]
    coarse = {vocabulary.tp_range(index, 2)[0] for index in range(2)}
    assert coarse <= {vocabulary.tp_range(index, 4)[0] for index in range(4)}


def test_sections_are_cut_each_for_itself() -> None:
    """Experts [2, gate and up of 6, 3]: rank 1 of 2 has rows 3..5 of the gate and of the up projection."""
    param = Param("experts.gate_up_proj", (2, 12, 3), 0, cut=1, sections=2)
    assert param.grid == (4, 6, 3)
    block = Block(param, *param.tp_range(1, 2))
    assert (block.start, block.stop, block.shape, block.num_elements) == (3, 6, (2, 6, 3), 36)


@pytest.mark.parametrize(("stages", "bounds"), [((), (0, 1, 3)), ((2, 1), (0, 2, 3)), ((1, 2), (0, 1, 3))])
def test_stages(stages: tuple[int, ...], bounds: tuple[int, ...]) -> None:
    parallelism = Parallelism(pp=2, stages=stages)
    assert stage_bounds(3, parallelism) == bounds
    names = {param.name: stages_of(param, bounds) for param in SMALL.params}
    assert names["model.embed_tokens.weight"] == (0,)
    assert names["model.norm.weight"] == names["lm_head.weight"] == (1,)
    assert names["model.layers.1.mlp.up_proj.weight"] == (0 if bounds[1] == 2 else 1,)


def test_a_tied_embedding_has_two_holders_and_is_kept_once() -> None:
    two = Parallelism(pp=2)
    blocks = lambda pp, once: {b.param.name for b in shard(TIED, two, 0, pp, once=once).blocks}
    embedding = "model.embed_tokens.weight"
    assert embedding in blocks(0, False) & blocks(1, False)
    assert embedding in blocks(0, True)
    assert embedding not in blocks(1, True)
    assert shard(TIED, two, 0, 1).aliases == {"lm_head.weight": embedding}
    assert shard(TIED, two, 0, 1, once=True).aliases == {}
    layout = Layout.on(range(4), dp=2, pp=2)
    masters = zero_shards(TIED, layout, "float32")
    held = sum(holding.box.num_elements for mine in masters.ranks.values() for holding in mine)
    assert held == TIED.num_elements


def test_optimizer_state_by_hand() -> None:
    """Two parameters of 70 and 10 elements stand at 0 and 96; 128 elements in all, 64 for each of two ranks."""
    parameters = Parameters((Param("a", (7, 10)), Param("b", (10,))))
    masters = zero_shards(parameters, Layout.on(range(2), dp=2), "float32", "m")
    assert [[(h.param, h.box[4:], h.offset) for h in masters.ranks[rank]] for rank in (0, 1)] == [
        [(0, (0, 64), 0)],
        [(0, (64, 70), 0), (1, (0, 10), 32)],
    ]
    assert masters.buffers == {0: {"m": 64}, 1: {"m": 64}}
    assert [zero_range(96, index, 2) for index in (0, 1)] == [(0, 32), (32, 96)]


def test_weights_lie_as_the_flat_layout_says() -> None:
    layout = Layout.on(range(4), tp=2, pp=2)
    held = weights(SMALL, layout, "bfloat16")
    flat = shard(SMALL, layout.parallelism, tp=1, pp=1)
    assert [(SMALL.params[h.param].name, h.offset) for h in held.ranks[3]] == [
        (block.param.name, start) for block, start, _ in flat.entries
    ]
    assert num_bytes(3, held) == 2 * flat.num_elements


def test_what_pipelines_and_heads_need_is_read_from_a_layout() -> None:
    names = ["tok.weight", "pos.weight", "layers.0.attn.q_proj.weight", "layers.0.attn.v_proj.weight", "norm.weight"]
    params = [Param(name, (8, 4), 0 if "layers" in name else None, 0 if "proj" in name else None) for name in names]
    found = Parameters.of(FlatLayout.one_rank(params, {"head.weight": "tok.weight"}), heads=4, groups=2)
    assert [param.ends for param in found.params if param.layer is None] == ["both", "first", "last"]
    assert found.params[2].heads == Heads(4, 2)
    assert found.params[3].heads == Heads(4, 2, shared=True)
    assert Parameters.of(FlatLayout.one_rank(params)).params[0].ends == "first"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.on(range(4), dp=2), "ranks: expected dp * tp * pp = 2 ranks for dp2 tp1 pp1, found 4"),
        (lambda: Mesh((0, 1, 1)), "ranks: expected distinct ranks"),
        (lambda: Mesh(()), "ranks: expected at least one"),
        (lambda: Parallelism(tp=0), "tp: expected at least 1, found 0"),
        (lambda: Parallelism(pp=2, stages=(3,)), "stages: expected the layers of each of 2 stages, found [3]"),
        (lambda: Parallelism(pp=2, stages=(3, 0)), "stages: expected at least one layer in each"),
        (lambda: Cluster(0, 2), "cluster: expected at least one node"),
        (lambda: check(SMALL, Layout.on(range(2), dp=2), Cluster(1, 1)), "ranks: expected ranks below 1"),
        (lambda: check(SMALL, Layout.on(range(4), pp=4)), "pp: expected at most 3, the layers of the model, found 4"),
        (lambda: check(SMALL, Layout.on(range(5), tp=5)), "tp: expected at most 4, the query heads, found 5"),
        (
            lambda: check(SMALL, Layout(Mesh((0, 1)), Parallelism(pp=2, stages=(1, 1)))),
            "stages: expected 3 layers in all, found 1 + 1 = 2",
        ),
        (
            lambda: check(Parameters((Param("w", (4,)),)), Layout.on(range(2), tp=2)),
            "tp: expected 1, because the model has no plan for tensor parallelism, found 2",
        ),
        (
            lambda: check(Parameters((Param("w", (3, 4), cut=0),)), Layout.on(range(4), tp=4)),
            "tp: expected at most 3, the elements of dim 0 of w, found 4",
        ),
        (
            lambda: check_instances(SMALL, [Layout.on((0, 1), tp=2), Layout.on((2, 1), pp=2)]),
            "ranks: expected instances on devices of their own, found 1 in instances 0 and 1",
        ),
        (lambda: check_instances(SMALL, [Layout.on(range(2), dp=2)]), "dp: expected 1 for instance 0"),
        (lambda: weights(SMALL, Layout.on(range(1)), "int3"), "dtype: expected one of"),
    ],
)
def test_what_is_refused(make, message: str) -> None:
    with pytest.raises(LayoutError, match="^" + re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("layers", "stages", "head", "expected"),
    [
        (30, 1, 8.0, (30,)),
        (30, 2, 8.0, (19, 11)),  # SmolLM2-135M: 19 and 11 + 8
        (30, 2, 8.2, (19, 11)),
        (30, 3, 8.0, (12, 13, 5)),  # 13 + 13 + 4 has the same maximum; the larger last stage is taken
        (30, 4, 8.0, (9, 9, 10, 2)),
        (30, 2, 0.0, (15, 15)),
        (7, 3, 0.0, (2, 2, 3)),
        (7, 2, 0.001, (4, 3)),  # of a critic: the head is nothing, but not quite
        (3, 2, 50.0, (2, 1)),  # no stage is without a layer
        (2, 2, 5.0, (1, 1)),
    ],
)
def test_stages_of_equal_work_by_hand(layers: int, stages: int, head: float, expected: tuple[int, ...]) -> None:
    assert balanced_stages(layers, stages, head) == expected


@given(st.data(), st.integers(1, 12), st.floats(0, 20))
def test_no_other_division_has_a_smaller_largest_stage(data: st.DataObject, layers: int, head: float) -> None:
    stages = data.draw(st.integers(1, layers))
    largest = lambda sizes: max((*sizes[:-1], sizes[-1] + head))
    found = balanced_stages(layers, stages, head)
    cuts = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
    every = [tuple(b - a for a, b in pairwise(cut)) for cut in cuts]
    assert found in every, "it is a division: as many stages, all layers, at least one in each"
    assert largest(found) == min(map(largest, every))

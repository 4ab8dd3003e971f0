"""Who updates and counts what: every element once, as the layout algebra has it."""

from __future__ import annotations

from typing import Any

import pytest

from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import zero_shards
from plait.layout.mesh import Coordinates, Layout, Mesh, Parallelism
from plait.layout.params import Block, FlatLayout, Param, Parameters
from plait.layout.shards import check, shard
from plait.layout.zero_shares import Share, tied_pieces

SMALL: dict[str, Any] = {"layers": 4, "hidden": 12, "intermediate": 10, "head_dim": 3, "vocabulary": 37}
TIED = decoder_parameters(**SMALL, heads=8, kv_heads=2, tied=True, cut_vocabulary=True)
UNTIED = decoder_parameters(**SMALL, heads=4, kv_heads=4, tied=False, cut_vocabulary=True)
SIZES = [sizes for size in (1, 2, 3, 4, 8) for sizes in Parallelism.all_of(size) if sizes.pp <= 4 and sizes.tp <= 4]


def shares_of(parameters: Parameters, sizes: Parallelism):
    layout = Layout(Mesh(tuple(range(sizes.size))), sizes)
    check(parameters, layout)
    for rank in layout.mesh.ranks:
        place = layout.coordinates(rank)
        flat = shard(parameters, sizes, place.tp, place.pp)
        counted = [
            (start, stop)
            for block, start, stop in flat.entries
            if is_first_holder(block, sizes.tp, place.tp) and not (block.param.ends == "both" and place.pp)
        ]
        yield rank, layout, flat, Share.of(flat, counted, sizes, place)


def is_first_holder(block: Block, ways: int, index: int) -> bool:
    """Whether no rank before has the block: replicated parameters, and keys, are those of several."""
    own = (block.start, block.stop)
    return all(block.param.tp_range(other, ways) != own for other in range(index))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("parameters", [TIED, UNTIED], ids=["tied", "untied"])
def test_a_norm_counts_every_element_once(parameters, sizes):
    counted = 0
    for _, _, flat, share in shares_of(parameters, sizes):
        for low, high in share.counted:
            assert share.start <= low < high <= share.stop
            counted += sum(max(0, min(stop, high) - max(start, low)) for _, start, stop in flat.entries)
    assert counted == parameters.num_elements


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("parameters", [TIED, UNTIED], ids=["tied", "untied"])
def test_masters_lie_as_the_layout_says(parameters, sizes):
    for rank, layout, _, share in shares_of(parameters, sizes):
        held = zero_shards(parameters, layout, "float32")
        assert held.buffers[rank] == {"masters": share.stop - share.start}
        lengths = [piece.stop - piece.start for piece in share.pieces]
        assert sum(lengths) == sum(holding.box.num_elements for holding in held.ranks[rank])
        starts = {piece.start - share.start for piece in share.pieces}
        assert starts <= {holding.offset for holding in held.ranks[rank]}


def test_only_the_ends_of_a_pipeline_share_a_tied_embedding():
    tied = {rank: share.tied for rank, _, _, share in shares_of(TIED, Parallelism(pp=4))}
    assert tied[1] == tied[2] == ()
    assert tied[0] == tied[3] == ((0, 37 * 12),)
    assert all(share.tied == () for _, _, _, share in shares_of(UNTIED, Parallelism(pp=4)))
    assert all(share.tied == () for _, _, _, share in shares_of(TIED, Parallelism(tp=2)))


@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if sizes.pp > 1], ids=str)
def test_ends_of_a_pipeline_divide_a_tied_embedding_alike(sizes):
    """As the first stage updates it: what a place along dp has of it there it has on the last stage, too."""
    ends: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, layout, flat, share in shares_of(TIED, sizes):
        place = layout.coordinates(rank)
        found = tied_pieces(flat, TIED, sizes, place)
        if place.pp not in (0, sizes.pp - 1):
            assert found == []
            continue
        ((first, stop),) = share.tied
        assert [start for _, start, _ in found] == [first, *(end for _, _, end in found[:-1])]
        assert found[-1][2] == stop
        mine = [(start - first, end - first) for owner, start, end in found if owner == place.dp]
        assert ends.setdefault((place.dp, place.tp), mine) == mine
        if place.pp == 0:
            assert all(share.start <= start + first and end + first <= share.stop for start, end in mine)


def test_biases_of_experts_are_no_matrix():
    """They are stacked, as those of gpt-oss: a row for each expert."""
    experts = "model.layers.0.mlp.experts"
    shapes = {f"{experts}.down_proj": (4, 8, 6), f"{experts}.down_proj_bias": (4, 6), "model.norm.weight": (6,)}
    layout = FlatLayout.one_rank(Param(name, shape) for name, shape in shapes.items())
    share = Share.of(layout, [], Parallelism(), Coordinates(0, 0, 0))
    assert [piece.is_matrix for piece in share.pieces] == [True, False, False]

"""Weights that lie in the memory of others, against one plain flat buffer."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.layout.decoder import decoder_parameters
from plait.layout.holdings import weights
from plait.layout.mesh import Layout
from plait.layout.params import ALIGNMENT_ELEMENTS, FlatLayout, Param, Parameters
from plait.layout.shards import shard
from plait.models import flat_weights
from plait.models.flat_weights import FlatWeights
from plait.models.parallel.peers import Peers
from tests.cases import examples
from tests.layout.nests import nested

SMALL = decoder_parameters(
    layers=2, hidden=6, intermediate=8, heads=4, kv_heads=4, head_dim=2, vocabulary=17, cut_vocabulary=True
)
CASES = [(tp, rank, stages) for tp in (2, 4) for rank in range(4) for stages in (False, True)]


def plain_and_nested(tp: int, rank: int, stages: bool) -> tuple[torch.Tensor, FlatWeights, dict[str, torch.Tensor]]:
    """The part of a rank of tp (or of two stages, whose neighbours have halves) in a buffer of its own; the same in
    that of another part, and the buffers."""
    narrow = Layout.on(range(4), dp=4 // tp, tp=tp)
    wide = Layout.on(range(4), dp=2, pp=2) if stages else Layout.on(range(4), dp=4)
    part, other = nested([weights(SMALL, narrow, "bfloat16", "own"), weights(SMALL, wide, "bfloat16", "other")])
    layout = shard(SMALL, narrow.parallelism, narrow.coordinates(rank).tp, 0)
    lengths = {**part.buffers[rank], **other.buffers[rank]}
    memory = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in lengths.items()}
    found = FlatWeights.nested(layout, part.ranks[rank], memory)
    plain = torch.zeros(layout.num_elements, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(rank)
    for _, start, stop in layout.entries:
        plain[start:stop] = torch.randn(stop - start, generator=generator)
    found.write(0, layout.num_elements, plain)
    return plain, found, memory


def gaps(layout: FlatLayout) -> torch.Tensor:
    """Whether an element of the flat layout is in no block."""
    empty = torch.ones(layout.num_elements, dtype=torch.bool)
    for _, start, stop in layout.entries:
        empty[start:stop] = False
    return empty


@settings(max_examples=examples(25, 60), deadline=None)
@given(
    case=st.sampled_from(CASES),
    cuts=st.lists(st.integers(0, 500), min_size=2, max_size=2),
    piece=st.sampled_from([1, 3, 32, 1 << 22]),
)
def test_ranges_are_those_of_a_flat_buffer(case, cuts: list[int], piece: int) -> None:
    """Read and written in pieces of any size, in the own dtype and in a wider one; nothing else is touched."""
    plain, found, memory = plain_and_nested(*case)
    assert found.whole is None
    assert (found.num_elements, found.dtype) == (len(plain), plain.dtype)
    low, high = sorted(min(cut, len(plain)) for cut in cuts)
    before, flat_weights.PIECE_ELEMENTS = flat_weights.PIECE_ELEMENTS, piece
    try:
        assert torch.equal(found.read(low, high, torch.full((high - low,), 7.0)), plain[low:high].float())
        values = torch.randn(high - low)
        outside = {name: buffer.clone() for name, buffer in memory.items()}
        found.write(low, high, values)
    finally:
        flat_weights.PIECE_ELEMENTS = before
    plain[low:high] = values.bfloat16().where(~gaps(found.layout)[low:high], torch.tensor(0.0).bfloat16())
    assert torch.equal(found.flat("cpu"), plain)
    changed = sum(int((buffer != outside[name]).sum()) for name, buffer in memory.items())
    assert changed <= high - low
    for step in (1, 3, ALIGNMENT_ELEMENTS + 1):
        assert torch.equal(found.sampled(step), plain[::step])


def test_ranges_of_several_sections_are_one_dense_block() -> None:
    """Queries, keys and values of two of four key heads, in the memory of a part with the same of them."""
    params = (Param("conv1d.weight", (28, 1, 3), 0, 0, widths=(2, 2, 3)), Param("norm", (5,), 0))
    layout, other = (Layout.on(range(4), dp=2, tp=2), Layout.on(range(4), tp=2, pp=2))
    parameters = Parameters((*params, Param("layers.1.norm", (5,), 1)))
    held = [weights(parameters, one, "float32", name) for one, name in ((layout, "own"), (other, "other"))]
    found, _ = nested(held)
    memory = {name: torch.arange(float(size)) for name, size in found.buffers[1].items()}
    blocks = shard(parameters, layout.parallelism, 1, 0)
    conv, *_ = FlatWeights.nested(blocks, found.ranks[1], memory).views
    assert conv.shape == (14, 1, 3)
    assert conv.is_contiguous()
    assert conv.flatten().diff().eq(1).all(), "no gap between the sections"


def test_blocks_keep_their_shapes_and_their_memory() -> None:
    """A part of tp 2 inside the whole: rows are a range, columns strided; a version for all memory that it lies in."""
    plain, found, memory = plain_and_nested(2, 1, stages=False)
    assert list(memory) == ["other"]
    for (block, start, stop), view in zip(found.layout.entries, found.views, strict=True):
        assert torch.equal(view, plain[start:stop].view(block.shape)), block.param.name
        assert view.untyped_storage().data_ptr() == memory["other"].untyped_storage().data_ptr()
    blocks = zip(found.layout.blocks, found.views, strict=True)
    strides = {block.param.name.split(".")[-2]: v.stride() for block, v in blocks}
    assert strides["down_proj"] == (8, 1)
    assert strides["up_proj"] == (6, 1)
    version = found.version
    memory["other"].zero_()
    assert found.version > version
    parameter = torch.nn.Parameter(found.views[0], requires_grad=False)
    found.write(0, 1, torch.ones(1))
    assert parameter._version == memory["other"]._version == found.version
    assert parameter.flatten()[0] == 1


def test_one_buffer_is_itself() -> None:
    layout = shard(SMALL, Layout.on(range(2), tp=2).parallelism, 0, 0)
    buffer = torch.randn(layout.num_elements)
    whole = FlatWeights(layout, buffer)
    assert whole.whole is whole.flat("cpu") is buffer
    assert whole.read(3, 9, torch.empty(6)).tolist() == buffer[3:9].tolist()
    whole.write(3, 9, torch.arange(6.0))
    assert buffer[3:9].tolist() == [0, 1, 2, 3, 4, 5]
    whole.all_gather(Peers.alone(), (0, layout.num_elements))
    whole.broadcast(Peers.alone(), 0, 5, 0)
    assert buffer[3:5].tolist() == [0, 1]

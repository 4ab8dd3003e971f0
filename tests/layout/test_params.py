"""Blocks of parameters in one flat buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.layout.params import ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, Block, FlatLayout, Param
from plait.models.flat_weights import cut_block


def test_by_hand() -> None:
    """Two bytes are the narrowest dtype, so 64 bytes are 32 elements: 33 take two lines, 6 take one."""
    layout = FlatLayout.one_rank([Param("a", (3, 11)), Param("b", (6,)), Param("c", (2, 2))], {"d": "a"})
    assert layout.offsets == (0, 64, 96)
    assert layout.num_elements == 128
    assert [(block.param.name, start, stop) for block, start, stop in layout.entries] == [
        ("a", 0, 33),
        ("b", 64, 70),
        ("c", 96, 100),
    ]


def test_a_block_is_a_range_of_the_cut_dim() -> None:
    param = Param("w", (4, 6), layer=0, cut=1)
    assert Block.whole(param).shape == (4, 6)
    block = Block(param, 2, 5)
    assert block.shape == (4, 3)
    assert block.num_elements == 12
    assert FlatLayout((block, Block(param, 5, 6))).offsets == (0, 32)


def test_units_have_a_range_of_each_section() -> None:
    """Three key heads: queries and keys of 2 rows each, and 3 rows of values. The last two of them have rows 2..5 of
    the queries' 6, 8..11 of the keys' and 15..20 of the values'."""
    param = Param("in_proj_qkv.weight", (3 * 7, 5), layer=0, cut=0, widths=(2, 2, 3))
    assert [param.tp_range(index, 2) for index in range(2)] == [(0, 1), (1, 3)]
    block = Block(param, 1, 3)
    assert (block.shape, block.num_elements) == ((14, 5), 70)
    assert block.ranges == ((2, 6), (8, 12), (15, 21))
    assert Block.whole(param).ranges == ((0, 21),)
    whole = torch.arange(21)[:, None].expand(21, 5)
    assert cut_block(whole, block)[:, 0].tolist() == [2, 3, 4, 5, 8, 9, 10, 11, 15, 16, 17, 18, 19, 20]


def test_units_of_one_section_are_a_range() -> None:
    """The output projection of three heads of two values each."""
    param = Param("out_proj.weight", (4, 6), layer=0, cut=1, widths=(2,))
    block = Block(param, *param.tp_range(1, 2))
    assert (block.shape, block.ranges) == ((4, 4), ((2, 6),))


def test_a_replicated_parameter_has_one_block() -> None:
    assert Block.whole(Param("norm", (5,))) == Block(Param("norm", (5,)), 0, 1)
    assert Block.whole(Param("norm", (5,))).shape == (5,)
    assert Block.whole(Param("scale", ())).num_elements == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda: Param("w", (4, 6), cut=2),
        lambda: Param("w", (5, 6), cut=0, sections=2),
        lambda: Param("w", (6, 6), widths=(2, 1)),
        lambda: Param("w", (7, 6), cut=0, widths=(2, 1)),
        lambda: Param("w", (6, 6), cut=0, sections=2, widths=(2, 1)),
        lambda: Param("w", (6, 6), cut=1, widths=(2, 1)),
        lambda: Block(Param("w", (4, 6), cut=0), 2, 5),
        lambda: Block(Param("w", (4, 6), cut=0), 2, 2),
        lambda: FlatLayout.one_rank([Param("w", (2,)), Param("w", (2,))]),
        lambda: FlatLayout.one_rank([Param("w", (2,))], {"v": "u"}),
        lambda: FlatLayout.one_rank([Param("w", (2,))], {"w": "w"}),
    ],
)
def test_what_makes_no_sense_is_refused(build) -> None:
    with pytest.raises(AssertionError):
        build()


@given(st.lists(st.lists(st.integers(1, 40), max_size=3), max_size=12))
def test_blocks_are_aligned_and_disjoint(shapes: list[list[int]]) -> None:
    layout = FlatLayout.one_rank(Param(str(i), tuple(shape)) for i, shape in enumerate(shapes))
    end = 0
    for block, start, stop in layout.entries:
        assert start >= end
        assert start - end < ALIGNMENT_ELEMENTS
        assert all(start * itemsize % ALIGNMENT_BYTES == 0 for itemsize in (2, 4, 8))
        assert stop - start == block.num_elements
        end = stop
    assert layout.num_elements >= end

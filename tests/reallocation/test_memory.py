"""Parts of flat buffers, messages made of them, staging memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.layout.boxes import Slice
from plait.reallocation.memory import Staging, gather, paired_runs, part, runs, scatter
from tests.reallocation.live_memory import LiveMemory

CPU = torch.device("cpu")


def elements(piece: Slice) -> list[tuple[str, int]]:
    return [(piece.buffer, at) for low, high in piece.ranges() for at in range(low, high)]


@st.composite
def pieces(draw: st.DrawFn) -> list[Slice]:
    """Contiguous and strided slices of two buffers of 100 elements, many of them neighbours, none twice."""
    found: list[Slice] = []
    for buffer in ("a", "b"):
        end = 0
        while end < 80:
            width = draw(st.integers(1, 4))
            if draw(st.booleans()):
                found.append(Slice(buffer, end, (width,), (1,)))
                end += width
            else:
                found.append(Slice(buffer, end, (2, width), (width + 1, 1)))
                end += 2 * width + 2
            end += draw(st.sampled_from((0, 0, 3)))
    return found


@given(pieces())
def test_runs_are_the_same_elements_in_the_same_order(found: list[Slice]) -> None:
    joined = runs(found)
    assert [at for piece in joined for at in elements(piece)] == [at for piece in found for at in elements(piece)]
    for piece, other in pairwise(joined):
        assert (
            piece.buffer != other.buffer
            or {len(piece.shape), len(other.shape)} != {1}
            or piece.offset + piece.shape[0] != other.offset
        )


@given(pieces())
def test_scatter_undoes_gather(found: list[Slice]) -> None:
    buffers = {"a": torch.arange(100.0), "b": 1000 + torch.arange(100.0)}
    message = torch.empty(sum(piece.num_elements for piece in found))
    gather(buffers, runs(found), message)
    assert message.tolist() == [1000 * (name == "b") + at for piece in found for name, at in elements(piece)]
    copies = {name: torch.full((100,), -1.0) for name in buffers}
    scatter(message, copies, found)
    touched = {at for piece in found for at in elements(piece)}
    for name, buffer in buffers.items():
        expected = [float(value) if (name, at) in touched else -1.0 for at, value in enumerate(buffer)]
        assert copies[name].tolist() == expected


def test_copies_join_where_both_ends_are_neighbours() -> None:
    def at(offset: int, size: int) -> Slice:
        return Slice("x", offset, (size,), (1,))

    sources, targets = [at(0, 2), at(2, 3), at(5, 1)], [at(10, 2), at(12, 3), at(16, 1)]
    assert paired_runs(sources, targets) == [(at(0, 5), at(10, 5)), (at(5, 1), at(16, 1))]


def test_a_slice_outside_its_buffer_is_refused_even_inside_its_storage() -> None:
    whole = torch.arange(10.0)
    assert part(whole[2:6], Slice("x", 1, (2,), (2,))).tolist() == [3, 5]
    with pytest.raises(AssertionError, match="outside a buffer of 4 elements"):
        part(whole[2:6], Slice("x", 1, (2,), (3,)))


def test_staging_stays_within_its_limit() -> None:
    staging = Staging(100, torch.float32, CPU)
    one, other = staging.take(60), staging.take(40)
    assert one is not None
    assert other is not None
    assert staging.take(1) is None
    staging.give_back(one)
    again = staging.take(50)
    assert again is not None
    assert again.data_ptr() == one.data_ptr(), "memory is used again"
    assert staging.take(20) is None
    staging.give_back(again)
    whole = staging.take(60)
    assert whole is not None
    assert whole.data_ptr() == one.data_ptr(), "and all of it"
    staging.give_back(whole)
    staging.give_back(other)
    assert staging.take(100) is not None, "what lies idle makes room for a longer message"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=40))
def test_staging_gives_memory_that_nobody_else_has(moves: list[tuple[bool, int]]) -> None:
    staging, used = Staging(100, torch.uint8, CPU), []
    with LiveMemory({}) as live:
        for number, (back, size) in enumerate(moves):
            if back and used:
                tensor, value = used.pop(0)
                assert tensor.tolist() == [value] * tensor.numel()
                staging.give_back(tensor)
                del tensor
            elif (tensor := staging.take(size)) is not None:
                tensor.fill_(number)
                used.append((tensor, number))
    assert sum(tensor.numel() for tensor, _ in used) <= 100
    assert live.peak_bytes <= 100
    for tensor, value in used:
        assert tensor.tolist() == [value] * tensor.numel()

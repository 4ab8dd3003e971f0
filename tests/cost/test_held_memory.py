"""Optimizer state on a rank, by hand."""

from __future__ import annotations

import pytest

from plait.cost.held_memory import optimizer_bytes, state_bytes
from plait.layout.mesh import Layout, Parallelism
from plait.layout.params import Param, Parameters
from plait.layout.shards import elements_by_stage

MIB = 1 << 20


@pytest.mark.parametrize(
    ("rows", "rooms"),
    [(MIB, 2 * 32 * MIB), (MIB // 32, 2 * 2 * MIB)],
    ids=["larger than a run", "less than a run"],
)
def test_runs_on_their_way_count_where_gradients_are_divided(rows: int, rooms: int) -> None:
    """Two ranks, each with half of the masters (4 bytes), moments (8) and gradients (4) of rows of 16 elements."""
    elements = 16 * rows
    parameters = Parameters((Param("matrix", (rows, 16)),))
    both, alone = Layout.on((0, 1), dp=2), Layout.on((0,))
    keys = {"followed": False, "sharded": True}
    for rank in (0, 1):
        assert optimizer_bytes(parameters, both, rank, "bfloat16", **keys) == elements // 2 * 16 + rooms
    assert state_bytes((elements, elements), 2, "bfloat16", **keys) == elements // 2 * 16 + rooms
    assert optimizer_bytes(parameters, alone, 0, "bfloat16", **keys) == elements * 16
    assert state_bytes((elements, elements), 1, "bfloat16", **keys) == elements * 16
    whole = {"followed": False, "sharded": False}
    assert optimizer_bytes(parameters, both, 0, "bfloat16", **whole) == elements // 2 * 12 + elements * 4


def test_the_last_stage_sums_a_tied_embedding_for_those_that_update_it() -> None:
    """Elements: an embedding of 4096, then two layers of 2048 and 1024. On two stages of two ranks, the first updates
    6144: rank 0 the first 3072, all of it embedding, rank 1 the other 1024 of the embedding and the layer. The last
    updates 1024, and sums as much of the embedding as its place along dp updates on the first."""
    tied, keys = Param("tied", (256, 16), ends="both"), {"followed": False, "sharded": True}
    layers = (Param("layers.0", (128, 16), layer=0), Param("layers.1", (64, 16), layer=1))
    parameters = Parameters((tied, *layers))
    layout = Layout.on(range(4), dp=2, pp=2)
    updated = {rank: optimizer_bytes(parameters, layout, rank, "bfloat16", **keys) for rank in range(4)}
    at = {rank: (layout.coordinates(rank).pp, layout.coordinates(rank).dp) for rank in range(4)}
    rooms = {0: 2 * 4 * 6144, 1: 2 * 4 * 5120}
    expected = {(0, 0): 16 * 3072, (0, 1): 16 * 3072, (1, 0): 16 * 512 + 4 * 3072, (1, 1): 16 * 512 + 4 * 1024}
    assert updated == {rank: expected[place] + rooms[place[0]] for rank, place in at.items()}
    (first,), (last,) = elements_by_stage(parameters, Parallelism(2, 1, 2))
    assert state_bytes(first, 2, "bfloat16", **keys) == max(updated[rank] for rank in at if at[rank][0] == 0)
    most = max(updated[rank] for rank in at if at[rank][0] == 1)
    assert state_bytes(last, 2, "bfloat16", **keys, first=first[0]) == most


def test_a_large_matrix_of_a_layer_has_room_for_all_its_runs() -> None:
    """24 Mi elements are three runs of 8 Mi, and one more is filled; the embedding, twice as large, does not count."""
    embedding, matrix = Param("embedding", (3 * MIB, 16)), Param("layers.0", (24 * MIB // 16, 16), layer=0)
    parameters = Parameters((embedding, matrix))
    layout, elements = Layout.on((0, 1), dp=2), 72 * MIB
    keys = {"followed": False, "sharded": True}
    expected = elements // 2 * 16 + 4 * 32 * MIB
    assert optimizer_bytes(parameters, layout, 0, "bfloat16", **keys) == expected
    assert state_bytes((elements, elements), 2, "bfloat16", **keys, largest=24 * MIB) == expected

"""Optimizer state on a rank, by hand."""

from __future__ import annotations

import pytest

from plait.cost.held_memory import optimizer_bytes, state_bytes
from plait.layout.mesh import Layout
from plait.layout.params import Param, Parameters

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
    assert state_bytes(elements, elements, 2, "bfloat16", **keys) == elements // 2 * 16 + rooms
    assert optimizer_bytes(parameters, alone, 0, "bfloat16", **keys) == elements * 16
    assert state_bytes(elements, elements, 1, "bfloat16", **keys) == elements * 16
    whole = {"followed": False, "sharded": False}
    assert optimizer_bytes(parameters, both, 0, "bfloat16", **whole) == elements // 2 * 12 + elements * 4

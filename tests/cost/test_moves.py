"""Terms of a move, by hand."""

from __future__ import annotations

import pytest

from plait.layout.mesh import Layout
from tests.cost.test_model_costs import HEAD, LAYER, WORK, a_cluster, costs_of, elements


def test_what_a_rank_has_already_it_copies() -> None:
    """Halves become wholes: each rank receives half of what is cut, and copies all else within its memory, which a copy
    passes twice."""
    found = costs_of(WORK, a_cluster(2)).move("actor", Layout.on(range(2), tp=2), Layout.on(range(2), dp=2))
    received = (HEAD + 4 * LAYER) // 2
    assert set(found.terms) == {"links", "copies"}
    assert found.terms["copies"] == pytest.approx(2 * (elements() - received) / (0.5e8 / 2))
    assert found.seconds == pytest.approx(found.terms["links"] + found.terms["copies"])

"""Terms of a move, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.cost.hardware import Link
from plait.cost.move_bound import BoundedMoves
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


def test_moves_take_what_messages_take_where_that_is_known() -> None:
    """A whole model from one rank to another, at half of a link of messages, and not of the faster one of sums; the
    bound of a search, too. Sums take what they did."""
    sums = a_cluster(2)
    messages = replace(sums, messages=Link(2e7, 0.0))
    one, other, two = Layout.on((0,)), Layout.on((1,)), Layout.on((0, 1), tp=2)
    found = costs_of(WORK, messages)
    assert found.move("actor", one, other).terms["links"] == pytest.approx(2 * elements() / 1e7)
    assert BoundedMoves(found).move("actor", one, other).terms["links"] == pytest.approx(2 * elements() / 1e7, rel=0.01)
    assert costs_of(WORK, sums).move("actor", one, other).terms["links"] < 0.3 * 2 * elements() / 1e7
    score = [costs_of(WORK, cluster).call("ref.logprobs", "score", two).terms for cluster in (sums, messages)]
    assert score[0] == score[1]

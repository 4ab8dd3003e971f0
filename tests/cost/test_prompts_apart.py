"""Seconds of drawing where prompts come from elsewhere, by hand and against drawing where they are computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.cost.layer_times import total
from plait.cost.prompts_apart import WAITING, Source, arrivals, drawn, tokens_sent
from plait.layout.mesh import Layout
from tests.cost.test_model_costs import WORK, a_cluster, costs_of

ONE_S: Any = SimpleNamespace(tokens=1.0, step=lambda running, said: {"layers": 1.0})
"""A step of any samples takes a second."""


def test_prompts_are_sent_when_the_next_step_has_ended() -> None:
    """Four in two steps of 3 s: those of the first wait for the end of the second."""
    assert arrivals([Source(4, 6.0, 2, 0.5)]) == [6.0 + 4 * 0.5] * 4
    assert arrivals([Source(3, 6.0, 3, 0.0)]) == [4.0, 6.0, 6.0]
    assert arrivals([Source(1, 6.0, 1, 0.5), Source(1, 2.0, 1, 0.5)]) == [2.5, 6.5]


def test_samples_begin_when_their_prompt_is_there() -> None:
    """The first token is three steps on its way: prompts of 1 s and 9 s begin at 4 and 12. One of 5 tokens takes 4 s
    from there; the other ends at 12 + 2."""
    terms = drawn([5, 3], [1.0, 9.0], 8, ONE_S)
    assert terms[WAITING] == pytest.approx(4 + (12 - 8))
    assert total(terms) == pytest.approx(14)
    assert total(drawn([5, 3], [1.0, 1.0], 8, ONE_S)) == pytest.approx(4 + 4)


def test_a_sample_waits_for_a_place() -> None:
    assert total(drawn([5, 3, 2], [1.0], 1, ONE_S)) == pytest.approx(4 + 4 + 2 + 1)
    assert total(drawn([5, 3, 2], [1.0], 2, ONE_S)) == pytest.approx(4 + max(4, 2 + 1))
    assert total(drawn([1, 1], [1.0], 2, ONE_S)) == pytest.approx(4), "their first tokens are all that they have"


def test_no_more_is_on_its_way_than_there_is() -> None:
    assert tokens_sent(100, 8, 300, 1) == 300
    assert tokens_sent(100, 8, 300, 4) == 800
    assert tokens_sent(400, 8, 300, 1) == 400


def test_drawing_apart_takes_the_steps_of_drawing_and_no_prompts() -> None:
    costs = costs_of(WORK, a_cluster(2))
    first, second = Layout.on((0,)), Layout.on((1,))
    prompts = costs.call("actor.generate", "prefill", second, apart=(first,))
    apart = costs.call("actor.generate", "decode", first, apart=(second,))
    together = costs.call("actor.generate", "decode", first)
    assert prompts.terms["prompts"] == pytest.approx(together.terms["prompts"])
    assert "prompts" not in apart.terms
    assert apart.terms[WAITING] >= prompts.seconds
    decoding = together.seconds - together.terms["prompts"]
    assert apart.seconds - apart.terms[WAITING] == pytest.approx(decoding, rel=0.05)
    assert prompts.working_bytes < apart.working_bytes

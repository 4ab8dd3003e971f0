"""How busy a rank was, by hand."""

from __future__ import annotations

import pytest

from plait.runtime.steps.off_policy import idle_ratio, idle_ratios
from plait.schedule.plan import Placement, Plan
from plait.schedule.timeline import Span, Timeline, covered_s

SPANS = (
    Span("a", "DECODE", 0, 0.0, 2.0),
    Span("b", "DECODE", 0, 1.0, 3.0),
    Span("c", "TRAIN", 1, 6.0, 7.0),
    Span("m", "SEND", 1, 0.0, 10.0, lane="link"),
    Span("f", "SCORE", 0, 0.0, 10.0, lane="reward worker 0"),
)


def test_seconds_in_several_intervals_count_once() -> None:
    assert covered_s([(1, 3), (0, 2), (5, 6), (5.5, 5.6)]) == pytest.approx(4)
    assert covered_s([]) == 0


def test_a_rank_is_idle_while_it_computes_nothing() -> None:
    timeline = Timeline(SPANS)
    assert idle_ratio(timeline, 0, 10.0) == pytest.approx(0.7)
    assert idle_ratio(timeline, 1, 10.0) == pytest.approx(0.9)
    assert idle_ratio(timeline, 2, 10.0) == 1.0


def test_each_side_is_the_mean_of_its_ranks() -> None:
    places = (
        Placement("actor.generate", "decode", (0, 2), dp=2),
        Placement("actor.train", "train", (1,)),
        Placement("critic.train", "train", (0,)),
    )
    found = idle_ratios(Timeline(SPANS), Plan("apart", 3, places), 10.0)
    assert found == {"rollouter": pytest.approx(0.85), "trainer": pytest.approx(0.8)}

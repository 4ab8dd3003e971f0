"""Seconds until each sample has a token more, from spans of decode steps."""

from __future__ import annotations

import pytest

from plait.policy.decode_pace import decode_line, decode_pace, line_through
from plait.schedule.timeline import Span, Timeline


def step(samples: int, rows: int, drawn: int, seconds: float, **of: str) -> Span:
    return Span(
        "actor.generate/decode", of.get("kind", "DECODE"), 0, 1.0, 1.0 + seconds, 0, rows, samples=samples, drawn=drawn
    )


def test_a_line_through_steps() -> None:
    assert line_through([(1, 2.0), (3, 4.0)]) == pytest.approx((1.0, 1.0))
    assert line_through([(4, 2.0), (4, 4.0)]) == (3.0, 0.0)
    assert line_through([(1, 4.0), (3, 2.0)]) == (3.0, 0.0), "more samples take no less"
    fixed, each = line_through([(1, 1.0), (2, 4.0)])
    assert fixed >= 0
    assert each > 0


def test_steps_that_were_held_up_do_not_count() -> None:
    steps = [(1, 2.0), (1, 2.0), (1, 50.0), (3, 4.0), (3, 4.0), (3, 90.0)]
    assert decode_line(steps) == pytest.approx((1.0, 1.0))


PLAIN = [step(n, n, n, 1.0 + 0.5 * n) for n in (1, 2, 8)]
DRAFTED = [step(n, 4 * n, 5 * n // 2, 1.0 + 0.5 * 4 * n) for n in (2, 4, 8)]
"""Three drafts for each sample, of which half are accepted: (1 + 2 n) / 2.5 s for a token of each."""
SOMETIMES = [step(2, 2, 2, 2.0), step(2, 8, 6, 5.0), step(2, 8, 2, 5.0), step(4, 4, 4, 3.0), step(4, 4, 4, 3.0)]
"""Of two samples 12 s bring 5 tokens each, of four 6 s two."""
IN_GROUPS = [step(8, 4, 4, 3.0), step(8, 4, 4, 3.0), step(2, 1, 1, 1.5)]
"""A step of half of the samples: each has a token more after two."""


@pytest.mark.parametrize(
    ("steps", "pace"),
    [
        (PLAIN, (1.0, 0.5, 1.0)),
        (DRAFTED, (0.4, 0.8, 2.5)),
        (SOMETIMES, (1.8, 0.3, 18 / 14)),
        (IN_GROUPS, (2.0, 0.5, 1.0)),
        ([*PLAIN, step(0, 90, 0, 50.0), step(4, 90, 4, 50.0, kind="SCORE")], (1.0, 0.5, 1.0)),
    ],
)
def test_a_token_of_each_sample(steps: list[Span], pace: tuple[float, float, float]) -> None:
    assert decode_pace(Timeline(tuple(steps))) == pytest.approx(pace)


def test_nothing_is_known_of_steps_that_there_are_not() -> None:
    """Spans of older versions, and those of vLLM, do not say how many samples they have."""
    assert decode_pace(Timeline((step(0, 8, 0, 1.0), step(4, 4, 4, 1.0, kind="PREFILL")))) is None

"""What drafts may lose: by hand, and that whoever keeps to it loses no more in any 32 steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.speculation.margin import Margin
from plait.speculation.promise import WINDOW
from tests.cases import examples


def covers(margin: Margin, price_s: float, plain_s: float = 1.0, once_s: float = 0.0) -> bool:
    return price_s <= margin.room_s(plain_s, once_s=once_s)


def test_it_grows_with_the_steps_by_hand() -> None:
    """1.9 % of 32 steps of a second are 0.608 s; of the first one 0.019 s, after ten steps, of eleven, 0.209 s."""
    margin = Margin()
    assert margin.room_s(1.0) == pytest.approx(0.019)
    for _ in range(10):
        margin.done(1.0, 0.0)
    assert margin.room_s(1.0) == pytest.approx(0.209)
    assert margin.room_s(1.0, once_s=0.1) == pytest.approx(0.109)
    for _ in range(100):
        margin.done(1.0, 0.0)
    assert margin.room_s(1.0) == pytest.approx(0.608), "no more is saved than for 32 steps"
    margin.done(1.4, 0.4)
    assert margin.room_s(1.0) == pytest.approx(0.208 + 0.019 * 0.4), "0.4 s of it are spent, the step was longer"
    for _ in range(200):
        margin.done(1.0, 0.01)
    assert margin.room_s(1.0) == pytest.approx(0.298), "0.31 s are spent in the last 31 steps"


def test_what_was_gained_counts_only_while_it_is_in_the_window() -> None:
    """Ten seconds were gained, but the 32 steps from now on have nothing of them. What was lost before they were gained
    is made up for."""
    margin = Margin()
    for _ in range(40):
        margin.done(1.0, 0.0)
    margin.done(1.5, 0.5)
    assert margin.room_s(1.0) < 0.12
    margin.done(1.0, -10.0)
    assert margin.room_s(1.0) == pytest.approx(0.608)


@settings(max_examples=examples(25, 50), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 1.5), st.floats(0.0, 2.0), st.booleans()), min_size=40, max_size=100),
    st.sampled_from([0.02, 0.1, 0.5]),
)
def test_who_spends_only_what_it_covers_never_falls_below_it(
    steps: list[tuple[float, float, bool]], may_lose: float
) -> None:
    """Each step is as long as a plain one of the same samples, or loses a price that was covered, or gains as much.
    Of steps that get shorter the loss may be a larger share, never of the longest."""
    margin, taken = Margin(may_lose), []
    for plain_s, price_s, gains in steps:
        lost_s = (-price_s / 2 if gains else price_s) if covers(margin, price_s, plain_s) else 0.0
        margin.done(plain_s + max(lost_s, 0.0), lost_s)
        taken.append((lost_s, plain_s))
    for first in range(len(taken) - WINDOW + 1):
        lost_s = sum(lost for lost, _ in taken[first : first + WINDOW])
        longest = max(plain for _, plain in taken[first : first + WINDOW])
        assert lost_s * (1 - margin.most_lost) <= margin.most_lost * WINDOW * longest + 1e-9


@pytest.mark.parametrize("price_s", [0.05, 0.3, 0.6, 0.7])
def test_of_equal_steps_no_window_is_slower_than_it_says(price_s: float) -> None:
    margin, lost = Margin(), []
    for _ in range(200):
        lost.append(price_s if covers(margin, price_s) else 0.0)
        margin.done(1.0 + lost[-1], lost[-1])
    sums = np.convolve(lost, np.ones(WINDOW), "valid")
    assert sums.max() <= margin.most_lost * (WINDOW + sums.max()) + 1e-9
    assert sums.max() > 0.0 or price_s > margin.most_lost * WINDOW, "what can be afforded is spent"

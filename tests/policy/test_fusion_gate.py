"""When the last samples of a rollout are gathered: by hand, and what holds of every choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.policy.fusion_gate import Seen, choose, fuses, gain_s, line_through
from plait.policy.threshold import Rollout, drained, outcome
from plait.schedule.plan import FUSION, Plan, PolicyChoice

FREES = Rollout(num_instances=2, step_s=lambda n: 1.0, score_s=2.0, max_batch=8, frees=True)


def test_an_instance_scores_as_soon_as_it_has_no_sample_left() -> None:
    """One ends at 1 s and scores its sample until 3 s; the other's ends at 5 s, and both score it in one."""
    assert drained(FREES, [[1.0], [5.0]], 0.0, 0.0) == 6.0
    assert outcome(FREES, [[1], [5]], 0).total_s == 6.0
    assert drained(FREES, [[1.0], [5.0]], 0.0, 0.0, until_s=2.0) == 1.0, "half of a sample is scored by then"


def test_gathering_by_hand() -> None:
    """Two samples each, of 1 and 5 steps. Staying: 4 samples of 2 s on two instances after 5 s: 9 s. Gathered at 1 s:
    the freed one scores two until 5 s, then both score the other two: 7 s; with a move of 1 s the others end a second
    later, and nothing is left to be scored in it: 8 s."""
    assert outcome(FREES, [[1, 5], [1, 5]], 0).total_s == 9.0
    found = outcome(FREES, [[1, 5], [1, 5]], 2)
    assert (found.total_s, found.migrated_s, found.kept) == (7.0, 1.0, 1)
    slow = Rollout(2, lambda n: 1.0, 2.0, 8, migration_s=1.0, frees=True)
    assert outcome(slow, [[1, 5], [1, 5]], 2).total_s == 8.0


SEEN = Seen(fixed_s=1.0, each_s=0.0, score_s=2.0, move_s=0.5, step_s=10.0)


def test_what_gathering_must_gain() -> None:
    """Three times the moves, or 2 % of the step where that is more."""
    assert SEEN.needed_s == 1.5
    assert Seen(1.0, 0.0, 2.0, 0.5, 100.0).needed_s == 2.0


def test_the_gain_of_what_is_left_by_hand() -> None:
    """One sample left on each, of 4 more steps, and 4 s of scoring wait. Staying: 4 s, then 8 s of work on two: 8 s.
    Gathered: one scores from now on 4 s; the others end at 4.5 s, and both score them in 2 s: 6.5 s."""
    assert gain_s(SEEN, [3, 7], [1, 1], 3, 4.0, 8) == pytest.approx(1.5)
    assert gain_s(SEEN, [3, 7], [1, 1], 3, 4.0, 1) == 0.0, "each instance takes one"
    assert gain_s(SEEN, [3, 7], [2, 0], 3, 4.0, 8) == 0.0, "they are in one instance"
    assert gain_s(SEEN, [3, 7], [1, 1], 7, 4.0, 8) == 0.0, "no response was longer"
    assert gain_s(SEEN, [3, 7], [1, 1], 3, 0.0, 8) < 0, "nothing waits: the moves are lost"


def test_nothing_is_gathered_where_nothing_is_known_or_gained() -> None:
    lengths = [1, 1, 1, 9]
    assert choose(None, lengths, 8, 2, 8, 0).why == "no step was measured yet"
    assert choose(SEEN, lengths, 8, 1, 8, 0).threshold == 0
    assert choose(Seen(1.0, 0.0, 0.0, 0.5, 10.0), lengths, 8, 2, 8, 0).why == "nothing could be scored meanwhile"
    equal = choose(SEEN, [5], 8, 2, 8, 0)
    assert (equal.threshold, equal.why) == (0, "it would gain too little")
    assert choose(Seen(1.0, 0.0, 2.0, 50.0, 10.0), lengths, 8, 2, 8, 0).threshold == 0, "the moves take too long"
    paid = choose(SEEN, lengths, 8, 2, 8, 0)
    assert paid.threshold > 0
    assert paid.gain_s >= paid.needed_s


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=40),
    st.floats(0.001, 1.0),
    st.floats(0.0, 0.1),
    st.floats(0.0, 2.0),
    st.floats(0.0, 5.0),
    st.integers(0, 5),
)
def test_a_choice_is_as_good_as_it_says(
    lengths: list[int], fixed: float, each: float, score: float, move: float, seed: int
) -> None:
    seen = Seen(fixed, each, score, move, 10.0)
    found = choose(seen, lengths, 16, 2, 16, seed)
    assert found == choose(seen, lengths, 16, 2, 16, seed)
    assert 0 <= found.threshold <= 8
    assert found.threshold == 0 or found.gain_s >= found.needed_s


def test_a_line_through_steps() -> None:
    assert line_through([(1, 2.0), (3, 4.0)]) == pytest.approx((1.0, 1.0))
    assert line_through([(4, 2.0), (4, 4.0)]) == (3.0, 0.0)
    assert line_through([(1, 4.0), (3, 2.0)]) == (3.0, 0.0), "more samples take no less"
    fixed, each = line_through([(1, 1.0), (2, 4.0)])
    assert fixed >= 0
    assert each > 0


def test_what_is_scored_together_follows_from_recipe_and_plan() -> None:
    plain = Plan("plain", 2)
    lets = Plan("lets", 2, policies=(PolicyChoice(FUSION),))
    assert [fuses("auto", one) for one in (plain, lets)] == [False, True]
    assert [fuses("off", one) for one in (plain, lets)] == [False, False]
    assert [fuses(0.5, one) for one in (plain, lets)] == [True, True]

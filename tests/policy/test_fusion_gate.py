"""When the last samples of a rollout are gathered: by hand, and what holds of every choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.policy.fusion_gate import (
    Remaining,
    RolloutSize,
    Seen,
    best_kept,
    choose,
    gains_s,
    num_draws,
)
from plait.policy.threshold import Backlog, Rollout, Waiting, comings, drained, outcome
from tests.cases import examples

FREES = Rollout(num_instances=2, step_s=lambda n: 1.0, score_s=2.0, max_batch=8, frees=True)


def test_an_instance_scores_as_soon_as_it_has_no_sample_left() -> None:
    """One ends at 1 s and scores its sample until 3 s; the other's ends at 5 s, and both score it in one."""
    ends = [[1.0], [5.0]]
    parts = FREES.parts(ends)
    coming = comings(ends, parts, FREES.works(parts))
    assert coming == [(1.0, 2.0), (5.0, 2.0)]
    assert drained(FREES, ends, coming, Waiting()) == 6.0
    assert outcome(FREES, [[1], [5]], 0).total_s == 6.0
    assert Backlog(FREES, ends, coming).at(2.0) == 1.0, "half of a sample is scored by then"


def test_samples_that_are_scored_together_wait_for_the_last_of_them() -> None:
    """Each of four samples takes 2 s to score. As they are: one instance scores from 3 s on, both from 5 s on: 8 s.
    Two are gathered at 1 s: scored one by one, the freed instance has 4 s of work until 5 s, and 4 s are left for both:
    7 s. Where both samples of an instance are a part, it has nothing to do before 3 s."""
    steps = [[1, 3], [1, 5]]
    assert outcome(FREES, steps, 0).total_s == 8.0
    assert outcome(FREES, steps, 2).total_s == 7.0
    in_parts = replace(FREES, together=2)
    assert outcome(in_parts, steps, 0).total_s == 8.0
    assert outcome(in_parts, steps, 2).total_s == 8.0


def test_groups_are_split_at_the_last_samples() -> None:
    """As above, but with two samples unfinished the two that have ended are scored without them, and prompts read again
    take 0.25 s more of each piece: 9 s in all. Gathered at 1 s, the freed instance scores until 5 s, and 5 s are left
    for both. As they are, it scores from 3 s on, and 7 s are left."""
    steps = [[1, 3], [1, 5]]
    split = replace(FREES, together=2, num_split=2, again_s=0.5)
    assert outcome(split, steps, 2).total_s == 5.0 + 5.0 / 2
    assert outcome(split, steps, 0).total_s == 5.0 + 7.0 / 2
    assert outcome(replace(split, num_split=4), steps, 0).total_s == 8.0, "nothing has ended by then"


def test_weights_that_come_back_are_waited_for() -> None:
    """The first instance scores its sample from 2 s to 4 s; at 5 s the second's is left, for the first alone until 6 s,
    for both from then on."""
    slow = replace(FREES, load_s=1.0)
    assert outcome(slow, [[1], [5]], 0).total_s == 6.5


def test_samples_that_wait_for_a_place_do_not_move() -> None:
    """One at a time: two samples of two steps end at 2 s and 4 s, the third, of one, at 1 s. Its instance scores two
    of them from 1 s on, and with the other from 4 s on what is left of 6 s: 5.5 s; side by side 4.5 s."""
    assert outcome(replace(FREES, slots=1), [[2, 2], [1]], 0).total_s == 5.5
    assert outcome(FREES, [[2, 2], [1]], 0).total_s == 4.5
    steps = [[5, 5, 5], [1, 5]]
    assert outcome(replace(FREES, slots=2), steps, 4).migrated_s is None
    assert outcome(replace(FREES, slots=3), steps, 4).migrated_s == 1.0


def test_gathering_by_hand() -> None:
    """Two samples each, of 1 and 5 steps. Staying: 4 samples of 2 s on two instances after 5 s: 9 s. Gathered at 1 s:
    the freed one scores two until 5 s, then both score the other two: 7 s; with a move of 1 s the others end a second
    later, and nothing is left to be scored in it: 8 s."""
    assert outcome(FREES, [[1, 5], [1, 5]], 0).total_s == 9.0
    found = outcome(FREES, [[1, 5], [1, 5]], 2)
    assert (found.total_s, found.migrated_s, found.kept) == (7.0, 1.0, 1)
    slow = Rollout(2, lambda n: 1.0, 2.0, 8, migration_s=1.0, frees=True)
    assert outcome(slow, [[1, 5], [1, 5]], 2).total_s == 8.0


TWO = RolloutSize(samples=8, instances=2, max_batch=8)
SEEN = Seen(fixed_s=1.0, each_s=0.0, score_s=2.0, move_s=0.5, step_s=10.0)


def test_what_gathering_must_gain() -> None:
    """Three times the moves, or 2 % of the step where that is more."""
    assert SEEN.needed_s == 1.5
    assert Seen(1.0, 0.0, 2.0, 0.5, 100.0).needed_s == 2.0


def test_the_gain_of_what_is_left_by_hand() -> None:
    """One sample left on each, of 4 more steps, and 4 s of scoring wait. Staying: 4 s, then 8 s of work on two: 8 s.
    Gathered: one scores from now on 4 s; the others end at 4.5 s, and both score them in 2 s: 6.5 s."""
    left = Remaining([[0], [1]], [[3], [3]], 4.0)
    assert gains_s(SEEN, [3, 7], left, TWO)[1] == pytest.approx(1.5)
    assert gains_s(SEEN, [3, 7], left, replace(TWO, max_batch=1)) == {}, "each instance takes one"
    assert gains_s(SEEN, [3, 7], replace(left, unfinished=[[0, 1], []], said=[[3, 3], []]), TWO) == {}, (
        "they are in one instance"
    )
    assert gains_s(SEEN, [3, 7], replace(left, said=[[7], [7]]), TWO) == {}, "no response was longer"
    waits = Remaining([[0, 2], [1]], [[3, 0], [3]], 4.0)
    assert gains_s(SEEN, [3, 7], waits, TWO)[1] > 0
    assert gains_s(SEEN, [3, 7], waits, replace(TWO, max_batch=2)) == {}, "three do not go in one"
    begun_later = replace(left, said=[[3], [0]])
    more, fewer = (gains_s(SEEN, [3, 7], rest, TWO)[1] for rest in (begun_later, left))
    assert more < fewer, "it has seven steps left, not four"
    assert gains_s(SEEN, [3, 7], replace(left, waiting_s=0.0), TWO)[1] < 0, "nothing waits: the moves are lost"


def test_what_would_lose_if_steps_took_a_fifth_more_is_left_alone() -> None:
    """A further sample adds 0.375 s to a step of 1 s. Staying: 4 steps of 1.375 s, then 8 s of work on two: 9.5 s.
    Gathered: 4 steps of 1.75 s, in which what waits is scored, then 4 s on two: 9 s. If the further sample added 0.45 s
    to 0.8 s, and scoring took 1.6 s, they would be 8.2 s and 8.4 s."""
    left = Remaining([[0], [1]], [[3], [3]], 4.0)
    assert best_kept(SEEN, [3, 7], left, TWO) == 1
    assert not best_kept(replace(SEEN, move_s=0.6), [3, 7], left, TWO), "three times the moves"
    slower = replace(SEEN, each_s=0.375, move_s=0.0, step_s=0.0)
    assert gains_s(slower, [3, 7], left, TWO)[1] == pytest.approx(0.5)
    wrong = replace(slower, fixed_s=0.8, each_s=0.45, score_s=1.6)
    assert gains_s(wrong, [3, 7], replace(left, waiting_s=3.2), TWO)[1] == pytest.approx(-0.2)
    assert not best_kept(slower, [3, 7], left, TWO)


FOUR = replace(TWO, instances=4)


def test_as_many_are_kept_as_gain_most_by_hand() -> None:
    """Four instances with a sample of 4 steps each, of 1 + 0.5 n s, and 30 s of scoring wait. As they are: 6 s, then
    34 s of work on four: 14.5 s. In one: 12 s, in which three score all that waits, then 4 s on four: 13 s. In two:
    8 s, in which two score 16 s, then 18 s on four: 12.5 s. In three: 8 s, in which one scores, and two more in the
    last 2 s: 12 s of work, then 22 s on four: 13.5 s."""
    seen = replace(SEEN, each_s=0.5, score_s=1.0, move_s=0.0, step_s=0.0)
    left = Remaining([[0], [1], [2], [3]], [[3], [3], [3], [3]], 30.0)
    assert gains_s(seen, [3, 7], left, FOUR) == pytest.approx({1: 1.5, 2: 2.0, 3: 1.0})
    assert best_kept(seen, [3, 7], left, FOUR) == 2
    assert best_kept(seen, [3, 7], replace(left, kept=3), FOUR) == 3, "fewer have no room"
    assert list(gains_s(seen, [3, 7], left, replace(FOUR, max_batch=2))) == [2, 3]
    assert best_kept(replace(seen, each_s=0.1), [3, 7], left, FOUR) == 1, "further samples cost little"
    assert best_kept(replace(seen, move_s=0.6), [3, 7], left, FOUR) == 0, "none gains three times the moves"


def test_nothing_is_gathered_where_nothing_is_known_or_gained() -> None:
    lengths = [1, 1, 1, 9]
    assert choose(None, lengths, TWO, 0).why == "no step was measured yet"
    assert choose(SEEN, lengths, replace(TWO, instances=1), 0).threshold == 0
    assert choose(Seen(1.0, 0.0, 0.0, 0.5, 10.0), lengths, TWO, 0).why == "nothing could be scored meanwhile"
    equal = choose(SEEN, [5], TWO, 0)
    assert (equal.threshold, equal.why) == (0, "it would gain too little")
    assert choose(Seen(1.0, 0.0, 2.0, 50.0, 10.0), lengths, TWO, 0).threshold == 0, "the moves take too long"
    paid = choose(SEEN, lengths, TWO, 0)
    assert paid.threshold > 0
    assert paid.gain_s >= paid.needed_s


@settings(max_examples=examples(25, 100))
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
    size = RolloutSize(16, 2, 16, together=4)
    found = choose(seen, lengths, size, seed)
    assert found == choose(seen, lengths, size, seed)
    assert 0 <= found.threshold <= 8
    assert found.threshold == 0 or found.gain_s >= found.needed_s


def test_of_large_rollouts_fewer_are_drawn() -> None:
    assert [num_draws(samples) for samples in (1, 1024, 1025, 2048, 4096, 100_000)] == [4, 4, 3, 2, 1, 1]

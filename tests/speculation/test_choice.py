"""Which drafts pay, by hand; and what a step takes, from steps of known cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.speculation.acceptance import Acceptance
from plait.speculation.choice import LEAST_GAIN, Room, Weighed, first, share_of, weigh
from plait.speculation.drafter import DraftTokens
from plait.speculation.pool import FloatArray, IntArray
from plait.speculation.step_cost import StepCost, non_negative_fit

SURVIVAL = np.array([[0.9, 0.8, 0.1], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
LENGTHS = np.array([3, 2, 0])


def weighed(
    seconds_M1: FloatArray,
    survival: FloatArray = SURVIVAL,
    lengths: IntArray = LENGTHS,
    prices_M1: FloatArray | None = None,
    **how: float,
) -> Weighed:
    drafts = DraftTokens(np.zeros(survival.shape, np.int32), lengths, np.zeros(survival.shape, np.int64), survival)
    prices = seconds_M1 - seconds_M1[0] if prices_M1 is None else prices_M1
    how = {"room_s": math.inf, "share": 1.0, "look_s": math.inf, "more_s": 0.0} | how
    room = Room(how["room_s"], how["share"], how["look_s"])
    return weigh(drafts, seconds_M1, prices, room, more_s=how["more_s"])


def test_the_likeliest_stand_first_and_of_equals_those_that_come_earlier() -> None:
    assert weighed(np.ones(6)).samples_M.tolist() == [0, 0, 1, 1, 0]
    equal = np.full((3, 2), 0.5)
    assert weighed(np.ones(7), equal, np.array([2, 2, 2])).samples_M.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("row_s", "lengths", "gain"),
    [
        (0.0, [3, 2, 0], (3 + 2.8) / 3),  # rows that cost nothing: all
        (0.1, [2, 2, 0], (3 + 2.7) / 3 / 1.4),  # 10 s and 1 s a row: the last costs more than it gives
        (0.2, [2, 0, 0], (3 + 1.7) / 3 / 1.4),
        (0.4, [0, 0, 0], 1.0),  # nothing is worth a row
    ],
)
def test_as_many_are_computed_as_give_the_most_tokens_per_second(row_s: float, lengths: list[int], gain: float) -> None:
    found = weighed(1.0 + row_s * np.arange(6)).best
    assert found.lengths_B.tolist() == lengths
    assert found.gain == pytest.approx(gain)


def test_what_every_step_takes_beside_makes_rows_cheaper() -> None:
    found = weighed(1.0 + 0.2 * np.arange(6), more_s=1.0).best
    assert found.lengths_B.tolist() == [2, 2, 0]
    assert found.gain == pytest.approx((3 + 2.7) / 3 / 1.4)


def test_a_gain_within_the_error_of_the_estimates_is_none() -> None:
    found = weighed(np.array([1.0, 1.1]), np.array([[0.11]]), np.array([1])).best
    assert found.lengths_B.tolist() == [0]


def test_of_what_is_not_allowed_the_next_best_is_computed() -> None:
    """The gain is that of the best, which tells whether looking up is worth its time."""
    found = weighed(1.0 + 0.1 * np.arange(6), room_s=0.25)
    assert found.allowed_M1.tolist() == [True, True, True, False, False, False]
    assert found.best.lengths_B.tolist() == [2, 0, 0]
    assert found.best.gain == pytest.approx((3 + 2.7) / 3 / 1.4)
    assert not weighed(1.0 + 0.1 * np.arange(6), room_s=-1.0).best.lengths_B.any()


def test_what_they_may_cost_and_what_they_are_expected_to_cost_must_both_be_covered() -> None:
    """The fifth is expected to cost 0.5 s, the third may cost a second."""
    seconds = 1.0 + 0.1 * np.arange(6)
    assert weighed(seconds, room_s=0.6, share=0.55).allowed_M1.tolist() == [True] * 4 + [False] * 2
    prices = np.array([0.0, 0.1, 0.2, 1.0, 0.4, 0.5])
    assert weighed(seconds, prices_M1=prices, room_s=0.6).allowed_M1.tolist() == [True, True, True, False, True, True]
    assert [share_of(1), share_of(4), share_of(8)] == pytest.approx([0.6, 0.9, 0.95])


@pytest.mark.parametrize(("room_s", "computed"), [(2.5, 2), (0.25, 1)])
def test_with_little_left_a_lone_sample_stakes_less(room_s: float, computed: int) -> None:
    """Two drafts gain 0.46, one 0.36, and each is right in half of the cases. Of 0.25 s, which one more try of two
    drafts, at 0.05 + 0.2 s, would spend, to be ruined takes 0.5, after a wrong one 0.5 ** (0.15 / 0.25),
    after two wrong ones 0.5 ** (0.05 / 0.25): for 26 × 0.46 that is worth 2.0 with one, 0.8 with two. Of 2.5 s it is
    nothing."""
    survival, seconds = np.array([[0.5, 0.25]]), np.array([1.0, 1.1, 1.2])
    found = weighed(seconds, survival, np.array([2]), room_s=room_s, look_s=0.05)
    assert found.best.lengths_B.tolist() == [computed]
    assert found.best.gain == pytest.approx(1.75 / 1.2), "of the best, whatever is left"
    many = weighed(seconds[[0, 1, 1, 1, 1]], np.full((4, 1), 0.5), np.ones(4, np.int64), room_s=room_s, look_s=0.05)
    assert many.best.lengths_B.tolist() == [1] * 4


def test_what_is_staked_with_heed_need_not_gain_enough_by_itself() -> None:
    """Two drafts gain 1.22 / 1.16, five percent, one 1.13 / 1.095, three, and is worth more for what it leaves: that
    something gains enough is asked of the two."""
    found = weighed(
        np.array([1.0, 1.095, 1.16]), np.array([[0.13, 0.09]]), np.array([2]), room_s=0.3, share=0.6, look_s=0.03
    )
    assert found.best.lengths_B.tolist() == [1]
    assert found.best.gain == pytest.approx(1.22 / 1.16)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_what_is_decided_at_once_is_what_arrays_say(num_samples: int, most: int, seed: int) -> None:
    """The same by sorting and sums over all drafts."""
    rng = np.random.default_rng(seed)
    survival = rng.uniform(0.05, 1.0, (num_samples, most)).cumprod(1)
    lengths = rng.integers(0, most + 1, num_samples)
    survival *= np.arange(most) < lengths[:, None]
    num_tokens = int(lengths.sum())
    seconds = 1.0 + rng.uniform(0.0, 0.3, num_tokens + 1).cumsum()
    found = weighed(seconds, survival, lengths, room_s=0.4)
    order = np.argsort(-survival.T.ravel(), kind="stable")[:num_tokens]
    assert found.samples_M.tolist() == (order % num_samples).tolist()
    likely = survival.T.ravel()[order]
    gains = (num_samples + np.array([0.0, *likely.cumsum()])) / seconds * seconds[0] / num_samples
    assert found.best.gain == pytest.approx(gains.max())
    best = int(np.where(found.allowed_M1, gains, 0.0).argmax())
    assert found.best.lengths_B.sum() == (best if gains[best] >= LEAST_GAIN else 0)


def test_beginnings_of_chains_are_chosen() -> None:
    samples_M = weighed(np.ones(6)).samples_M
    for count in range(6):
        assert first(samples_M, count, 3).lengths_B.sum() == count
    assert first(samples_M, 3, 3).lengths_B.tolist() == [2, 1, 0]


def test_the_fit_finds_weights_that_are_not_negative() -> None:
    rng = np.random.default_rng(0)
    a, x = rng.random((40, 5)), np.array([0.0, 2.0, 0.0, 0.5, 3.0])
    assert non_negative_fit(a, a @ x) == pytest.approx(x, abs=1e-9)
    assert (non_negative_fit(a, a @ np.array([1.0, -1.0, 1.0, -1.0, 1.0])) >= 0).all()


def true_s(rows: int, context: int) -> float:
    """A floor of 10 ms, rows of 0.2 ms, of 1 ms from the 17th on; a microsecond per token of context."""
    return 0.01 + 2e-4 * rows + 8e-4 * max(0, rows - 16) + 1e-6 * context


def test_what_steps_take_is_learned_from_steps() -> None:
    """Also between the counts that were measured, and though every tenth step took three times as long."""
    cost, rng = StepCost(), np.random.default_rng(1)
    for number in range(600):
        samples = int(rng.integers(1, 33))
        rows, context = (
            samples + int(rng.integers(0, 2) * rng.integers(0, samples + 1)),
            samples * int(rng.integers(50, 400)),
        )
        cost.observe(rows, context, true_s(rows, context) * (3.0 if number % 10 == 0 else rng.uniform(0.98, 1.02)))
    asked = np.arange(1, 60)
    found = cost.seconds(asked, 4000)
    expected = [true_s(int(rows), 4000) for rows in asked]
    assert np.abs(found / expected - 1).mean() < 0.1


def test_a_machine_that_slows_down_is_not_mistaken_for_context() -> None:
    """A sample says 46 tokens behind a prompt of 75 while steps come to take half as long again, drafts or not: they
    would fit a cost of nothing but context, and a step at the start of the next rollout would be free. Of buckets that
    rise alike the fit takes most for the floor."""
    cost = StepCost()
    for number in range(46):
        cost.observe(2 if number % 3 == 1 else 1, 75 + number, 0.02 + 0.0002 * number)
    assert 0.015 < cost.of(1, 0) <= cost.of(1, 75) < 0.03
    assert cost.of(1, 75) == pytest.approx(0.0225, rel=0.15)
    free = StepCost()
    for number in range(46):
        free.observe(2 if number % 3 == 1 else 1, 75 + number, (75 + number) * 3e-4)
    assert free.of(1, 0) > 0.5 * 75 * 3e-4


def test_more_rows_never_seem_to_cost_less_than_fewer_of_the_fit() -> None:
    cost = StepCost()
    for rows in (1, 1, 1, 2, 2, 2):
        cost.observe(rows, 100, 0.01)
    assert cost.seconds(np.array([1, 2, 3]), 100) == pytest.approx([0.01] * 3, rel=0.01)


def test_beyond_what_was_measured_a_row_takes_no_longer_than_before() -> None:
    """Kernels take rows by eights: the ninth and tenth take 5 ms, and the fit went on so, to 91 ms for 40 rows. By the
    2.1 ms that each of ten rows took, these are 84; of fewer than were measured it stays as it is."""
    cost = StepCost()
    for rows, seconds in ((8, 0.016), (10, 0.021)) * 20:
        cost.observe(rows, 100, seconds)
    assert cost.seconds(np.array([8, 10, 12, 40]), 100) == pytest.approx([0.016, 0.021, 0.0252, 0.084], rel=0.02)
    slow = StepCost()
    for rows, seconds in ((8, 0.016), (10, 0.017)) * 20:
        slow.observe(rows, 100, seconds)
    assert slow.of(40, 100) == pytest.approx(0.032, rel=0.02), "half a millisecond a row, as between these"


def test_of_two_steps_of_as_many_rows_the_shorter_counts() -> None:
    """In the longer one the machine may have done something else; a step never takes too little time."""
    cost = StepCost()
    for rows, seconds in ((8, 0.016), (8, 0.016), (10, 0.018), (10, 0.026)):
        cost.observe(rows, 100, seconds)
    cost.settle()
    assert cost.of(10, 100) == pytest.approx(0.018, rel=0.02)


def test_what_steps_may_take_by_hand() -> None:
    """Four rows take 10 ms, eight take 14, which the fit makes 10, 11, 12, 13 and 14: five to eight may take those of
    eight, but five no more than a row more of four. Of ten the fit says 16, and a row more of eight each 17.5."""
    cost = StepCost()
    for rows, seconds in ((4, 0.010), (8, 0.014)) * 40:
        cost.observe(rows, 100, seconds)
    asked = np.array([4, 5, 6, 8, 10])
    fitted = cost.seconds(asked, 100)
    assert cost.most(asked, 100)[:4] == pytest.approx([0.010, 0.0125, 0.014, 0.014], rel=0.02)
    assert cost.most(asked, 100)[4] == pytest.approx((fitted[4] + 0.0175) / 2, rel=0.02)
    assert (cost.most(asked, 100) >= fitted).all()


def test_acceptance_goes_from_the_confidence_to_what_was_seen() -> None:
    acceptance = Acceptance()
    before = acceptance.table_C.copy()
    cell = 7  # of the first source, context and place: confidence 0.7 … 0.8
    assert before[cell] == pytest.approx(0.5 * 0.75)
    for _ in range(10):
        acceptance.learn(np.full(100, cell), np.repeat([1, 0], [90, 10]))
    assert acceptance.table_C[cell] == pytest.approx(0.9, abs=0.01)
    assert before[cell] < acceptance.table_C[cell + 10] < 0.95, "another position in the draft learns from it"
    assert acceptance.table_C[cell - 5] == before[cell - 5], "another confidence does not"
    acceptance.forget()
    assert acceptance.trials_C.sum() == 500
    assert acceptance.hits_C[:, 0].sum() / acceptance.trials_C[:, 0].sum() == pytest.approx(0.9), "shares stay"
    assert acceptance.trials_C[:, 1:].sum() == 0

import math
import random
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.rewards.answers import Verdict
from plait.rewards.evaluation import Evaluation
from plait.rewards.scores import weighted_reward
from plait.rewards.statistics import (
    item_means,
    paired_difference,
    paired_gain,
    pass_at,
    pass_at_k,
    wilson,
)


def test_wilson_by_hand():
    # z = 1.959964, z² = 3.841459. 8 of 10: centre (0.8 + 0.192073)/1.384146 = 0.716740;
    # half 1.959964·√(0.016 + 0.00960365)/1.384146 = 0.226578.
    interval = wilson(8, 10)
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.8, 0.490162, 0.943318), abs=1e-6)
    # 0 of n: high = z²/(n + z²).
    assert wilson(0, 10).high == pytest.approx(3.841459 / 13.841459, abs=1e-6)
    assert wilson(0, 10).low == 0
    assert wilson(10, 10).high == 1
    # Brown, Cai and DasGupta 2001 quote Newcombe's 81 of 263: 0.2553 to 0.3662.
    assert wilson(81, 263).low == pytest.approx(0.2553, abs=1e-4)
    assert wilson(81, 263).high == pytest.approx(0.3662, abs=1e-4)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_solves_the_score_equation_and_is_symmetric(counts):
    successes, total = counts
    interval = wilson(successes, total)
    mirrored = wilson(total - successes, total)
    assert interval.low == pytest.approx(1 - mirrored.high, abs=1e-12)
    assert 0 <= interval.low <= interval.value <= interval.high <= 1
    for bound in (interval.low, interval.high):
        if 0 < bound < 1:  # |p̂ − p| = z √(p(1−p)/n)
            spread = 1.959964 * math.sqrt(bound * (1 - bound) / total)
            assert abs(interval.value - bound) == pytest.approx(spread, abs=1e-6)


def outcomes(both: int, lost: int, won: int, neither: int) -> tuple[list[bool], list[bool]]:
    before = [True] * (both + lost) + [False] * (won + neither)
    after = [True] * both + [False] * lost + [True] * won + [False] * neither
    return before, after


def test_paired_gain_by_hand():
    # All wrong before, 50 of 100 right after: φ = 0. Wilson of 50/100 is [0.403832, 0.596168], of 0/100 [0, 0.036995].
    # low = 0.5 − √(0.096168² + 0.036995²) = 0.396961; high = 0.5 + √(0.096168² + 0²) = 0.596168.
    gain = paired_gain(*outcomes(0, 0, 50, 50))
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.5, 0.396961, 0.596168), abs=1e-5)
    assert gain.excludes(0)
    # 20 stay right, 10 lost, 20 won, 50 stay wrong. cross = 20·50 − 10·20 = 800, less n/2: 750;
    # φ = 750/√(30·70·40·60) = 0.334077. Wilson of 30/100: [0.218949, 0.395849]; of 40/100: [0.309401, 0.497998].
    # low = 0.1 − √(0.090599² − 2φ·0.090599·0.095849 + 0.095849²) = 0.1 − 0.107671
    # high = 0.1 + √(0.097998² − 2φ·0.097998·0.081051 + 0.081051²) = 0.1 + 0.104239
    gain = paired_gain(*outcomes(20, 10, 20, 50))
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.1, -0.007671, 0.204239), abs=2e-6)
    assert not gain.excludes(0)


@given(st.tuples(*[st.integers(0, 60)] * 4).filter(any))
def test_paired_gain_is_antisymmetric_bounded_and_holds_the_gain(table):
    before, after = outcomes(*table)
    gain, loss = paired_gain(before, after), paired_gain(after, before)
    assert gain.value == pytest.approx(-loss.value)
    assert gain.low == pytest.approx(-loss.high, abs=1e-12)
    assert -1 - 1e-12 <= gain.low <= gain.value <= gain.high <= 1 + 1e-12


def test_paired_gain_covers_the_truth_in_19_of_20_samples():
    draw = random.Random(0)
    held = 0
    for _ in range(2000):
        pairs = draw.choices([(True, True), (True, False), (False, True), (False, False)], [20, 10, 25, 45], k=80)
        gain = paired_gain([x for x, _ in pairs], [y for _, y in pairs])
        held += gain.low <= 0.15 <= gain.high
    assert 0.935 < held / 2000 < 0.975


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(counts):
    n, c, k = counts
    subsets = list(combinations(range(n), k))
    share = Fraction(sum(any(place < c for place in subset) for subset in subsets), len(subsets))
    assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_k_by_hand():
    assert pass_at_k(8, 1, 1) == pytest.approx(1 / 8)
    assert pass_at_k(8, 1, 8) == 1
    assert pass_at_k(4, 2, 2) == pytest.approx(1 - 1 / 6)
    with pytest.raises(AssertionError, match="needs at least 9"):
        pass_at_k(8, 1, 9)


def test_pass_at_k_over_items_by_hand():
    """Three items of 4 answers with 1, 0 and 4 right: pass@2 is 1 − C(3,2)/C(4,2) = 1/2, 0 and 1."""
    right = [True, False, False, False, *[False] * 4, *[True] * 4]
    assert pass_at(right, 4, 2) == wilson(1.5, 3)
    assert pass_at(right, 4, 2).value == pytest.approx(0.5)
    assert pass_at(right, 4, 1).value == pytest.approx((1 / 4 + 0 + 1) / 3)
    assert pass_at(right, 4, 4).value == pytest.approx(2 / 3)
    # Of the second item one verdict is left, which pass@2 cannot tell from: 1/2 and 1 are left.
    some = [*right[:4], None, None, None, False, *right[8:]]
    assert pass_at(some, 4, 2) == wilson(1.5, 2)
    assert pass_at(some, 4, 1).value == pytest.approx((1 / 4 + 0 + 1) / 3)
    assert pass_at([None] * 4, 4, 1) is None


def test_the_interval_of_pass_at_k_covers_the_truth():
    """Items of unlike difficulty, 4 answers to each: pass@2 of the population lies within at least 19 times of 20."""
    draw = random.Random(1)
    chances = [0.02, 0.1, 0.5, 0.9]
    truth = sum(1 - (1 - p) ** 2 for p in chances) / len(chances)
    held = 0
    for _ in range(1000):
        items = [draw.choice(chances) for _ in range(40)]
        found = pass_at([draw.random() < p for p in items for _ in range(4)], 4, 2)
        held += found.low <= truth <= found.high
    assert held >= 950


def test_an_evaluation_of_several_answers():
    exact, wrong = Verdict.EXACT, Verdict.WRONG
    after = Evaluation((exact, exact, wrong, None, *[exact, wrong] * 5), per_item=2)
    assert after.exact == wilson(7 / 13 * 7, 7), "7 of 13 verdicts, with the interval of 7 items"
    before = Evaluation((wrong,) * 14, per_item=2)
    assert after.gain_over(before) == paired_difference([0.0] * 7, [1.0, 0.0, *[0.5] * 5])
    assert item_means([1.0, 2.0, math.nan, 4.0, math.nan, math.nan], 2)[:2] == [1.5, 4.0]


def test_weighted_reward():
    assert weighted_reward([1.0, None, 2.0], [1.0, 5.0, 0.25]) == 1.5
    assert math.isnan(weighted_reward([None, None], [1.0, 1.0]))
    assert math.isnan(weighted_reward([1.0, None], [1.0, 1.0], failed=True))


def test_an_evaluation():
    after = Evaluation((Verdict.EXACT, Verdict.WRONG, Verdict.MALFORMED, None))
    assert after.num_items == 3, "an item on which the scorer failed is no malformed one"
    assert after.exact == wilson(1, 3)
    assert after.well_formed == wilson(2, 3)
    assert after.exact_among_well_formed == wilson(1, 2)
    before = Evaluation((None, Verdict.EXACT, Verdict.MALFORMED, Verdict.MALFORMED))
    assert before.exact_among_well_formed == wilson(1, 1)
    assert Evaluation((Verdict.MALFORMED,)).exact_among_well_formed is None
    assert after.gain_over(before) == paired_gain([True, False], [False, False]), "items with a verdict in both"
    nothing = Evaluation((None,))
    assert (nothing.exact, nothing.well_formed, nothing.gain_over(nothing)) == (None, None, None)
    assert str(wilson(8, 10)) == "80.0% [49.0%, 94.3%]"

"""Advantages that are whitened or centred over a batch, by hand and against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.advantages import centred, decoupled, whitened
from tests.algorithms import oracle


def test_whitening_by_hand():
    # Four tokens with returns 1 | 3, 3, 5: mean 3, variance (4 + 4) / 3. A token counts, not a sample.
    unit = 2 / (8 / 3) ** 0.5
    first, second = whitened([np.array([1.0]), np.array([3.0, 3.0, 5.0])])
    assert first.tolist() == pytest.approx([-unit])
    assert second.tolist() == pytest.approx([0, 0, unit])


def test_a_batch_of_equal_returns_teaches_nothing():
    # 0.1 cannot be written in binary: their mean need not be 0.1.
    assert [part.tolist() for part in whitened([np.full(3, 0.1), np.full(4, 0.1)])] == [[0] * 3, [0] * 4]
    assert [part.tolist() for part in whitened([np.array([5.0])])] == [[0]]
    assert centred(np.full(7, 0.1)).tolist() == [0] * 7


@given(st.lists(st.lists(st.floats(-5, 5), max_size=4), min_size=1, max_size=6))
def test_whitening_equals_the_oracle(returns):
    found = whitened([np.array(sample, dtype=np.float64) for sample in returns])
    expected = oracle.whiten(returns)
    flat = [x for sample in returns for x in sample]
    spread = max(flat) - min(flat) if flat else 0.0
    if 0 < spread < 1e-6:
        return  # differences near the rounding of the mean
    assert [len(part) for part in found] == [len(part) for part in expected]
    for left, right in zip(found, expected, strict=True):
        assert left.tolist() == pytest.approx(right, rel=1e-6, abs=1e-8)


def test_decoupled_by_hand():
    """Figure 2 of the paper: of two rewards that are 0 or 1, sums of (0, 1) and of (0, 2) are one advantage to GRPO."""
    unit = 0.5 / (0.5**0.5 + 1e-4)
    one, both = [np.array([[0.0, 1.0], [0.0, rest]]) for rest in (0.0, 1.0)]
    assert decoupled(one, np.ones(2)).tolist() == pytest.approx([-unit, unit])
    assert decoupled(both, np.ones(2)).tolist() == pytest.approx([-2 * unit, 2 * unit])
    # Of a reward 1 and 1000, each counts by its weight alone, but where it says nothing.
    assert decoupled(both * [[1.0], [1000.0]], np.array([1.0, 2.0])).tolist() == pytest.approx(
        [-3 * unit, 3 * unit], 1e-3
    )


def test_a_reward_that_does_not_apply_says_nothing_of_a_sample():
    # The second: mean 2, standard deviation 1 of 1, 2, 3; the last sample has it not.
    scores = np.array([[0.1, 0.1, 0.1, 0.1], [1, 2, 3, np.nan]])
    unit = 1 / (1 + 1e-4)
    assert decoupled(scores, np.array([5.0, 2.0])).tolist() == pytest.approx([-2 * unit, 0, 2 * unit, 0])
    assert decoupled(np.array([[np.nan, 4.0]]), np.ones(1)).tolist() == [0, 0]


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(
            st.tuples(st.lists(st.sampled_from([None, 0.0, 0.1, 1.0, -3.0]), min_size=n, max_size=n), st.floats(-2, 2)),
            min_size=1,
            max_size=4,
        )
    )
)
def test_decoupled_equals_the_oracle(rewards):
    scores, weights = [scores for scores, _ in rewards], [weight for _, weight in rewards]
    found = decoupled(np.array(scores, dtype=np.float64), np.array(weights))
    assert found.tolist() == pytest.approx(oracle.decoupled(scores, weights), rel=1e-12, abs=1e-12)

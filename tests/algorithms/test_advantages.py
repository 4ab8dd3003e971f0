"""Advantages that are whitened or centred over a batch, by hand and against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.advantages import centred, whitened
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

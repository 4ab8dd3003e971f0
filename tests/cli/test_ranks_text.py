"""Ranks as a person reads them."""

from __future__ import annotations

import pytest

from plait.cli.ranks_text import few_ranks_text, ranks_text


@pytest.mark.parametrize(
    ("ranks", "whole", "few"),
    [
        ((3,), "3", "3"),
        ((0, 1), "0,1", "0,1"),
        ((2, 3, 4, 5, 6), "2-6", "2-6"),
        ((1, 0, 3, 2), "1,0,3,2", "1,0,3,2"),
        ((0, 2, 4, 6, 8), "0,2,4,6,8", "0,2,4,6…"),
        ((3, 2, 1, 0, 4), "3,2,1,0,4", "3,2,1,0…"),
    ],
)
def test_ranks_are_a_range_only_where_they_follow_each_other(ranks: tuple[int, ...], whole: str, few: str) -> None:
    assert ranks_text(ranks) == whole
    assert few_ranks_text(ranks) == few

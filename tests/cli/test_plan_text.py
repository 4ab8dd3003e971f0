"""What the table of a plan's calls says."""

from __future__ import annotations

import pytest

from plait.cli.plan_text import start_text


@pytest.mark.parametrize(
    ("start_s", "text"),
    [
        (0.0, "0"),
        (-1e-12, "0"),
        (0.000783312, "0.0008"),
        (1.23e-5, "1e-05"),
        (0.00123456, "0.00123"),
        (19.62, "19.6"),
        (1234.5, "1234"),
        (123456.7, "123457"),
    ],
)
def test_a_start_leaves_a_place_between_its_column_and_the_one_before(start_s: float, text: str) -> None:
    assert start_text(start_s) == text
    assert len(text) < 8

"""The benchmark of plan searches runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


def test_it_compares_all_engines() -> None:
    printed = output_of("plan_search.py", "--tiny", "--repeats", "1")
    for words in ("simulated", "portfolio", "descent", "random", "gap", "HybridFlow", "ReaL heuristic"):
        assert words in printed


@pytest.mark.slow
def test_new_searches_are_held_against_long_ones() -> None:
    printed = output_of("plan_search.py", "--tiny", "--repeats", "2", "--long", "0.1")
    assert "best of all" in printed
    assert "seed 1:" in printed

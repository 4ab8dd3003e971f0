"""The benchmark of plan searches runs."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.slow
def test_the_whole_of_a_search_is_timed_and_held_against_a_kept_one(tmp_path: Path) -> None:
    """The same number of plans finds the same plan."""
    kept = str(tmp_path / "kept.json")
    first = output_of("plan_search.py", "--tiny", "--whole", "--out", kept)
    again = output_of("plan_search.py", "--tiny", "--whole", "--against", kept)
    for name in ("2 tiny ppo", "2 tiny grpo"):
        (row,) = [line.split() for line in again.splitlines() if line.startswith(name)]
        assert row[5] == row[7], "seconds of a step, now and before"
        assert name in first

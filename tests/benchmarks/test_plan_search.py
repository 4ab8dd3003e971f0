"""The benchmark of plan searches runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_it_compares_all_engines() -> None:
    command = [sys.executable, "benchmarks/plan_search.py", "--tiny", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for words in ("simulated", "portfolio", "descent", "random", "gap", "HybridFlow", "ReaL heuristic"):
        assert words in done.stdout


@pytest.mark.slow
def test_new_searches_are_held_against_long_ones() -> None:
    command = [sys.executable, "benchmarks/plan_search.py", "--tiny", "--repeats", "2", "--long", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "best of all" in done.stdout
    assert "seed 1:" in done.stdout

"""The benchmarks of plan searches and of what they find on many devices run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_compares_all_engines() -> None:
    command = [sys.executable, "benchmarks/plan_search.py", "--tiny", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for words in ("simulated", "portfolio", "descent", "random", "gap", "HybridFlow", "ReaL heuristic"):
        assert words in done.stdout


def test_weak_scaling_is_labelled_as_simulated_with_its_error() -> None:
    command = [sys.executable, "benchmarks/weak_scaling.py", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "simulated seconds" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| 8 ", "| 16 "))]
    assert len(rows) == 2
    assert all(row.count("± 4%") >= 2 for row in rows)

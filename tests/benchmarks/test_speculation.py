"""The benchmark of speculation runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_it_runs() -> None:
    command = [sys.executable, BENCHMARKS / "speculation.py", "--tiny", "--repeats", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split("|")[1].strip() for line in ended.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["guessed", "---", "off", "1", "2", "4", "auto", "4, draft model", "auto, draft model"]
    (asked,) = (line for line in ended.stdout.splitlines() if line.startswith("| 4, draft model"))
    assert "model 100%" in asked, "the policy is always right about itself"

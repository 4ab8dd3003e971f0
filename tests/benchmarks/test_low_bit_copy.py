"""The benchmark of a copy in 4 bits runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.mark.slow
def test_it_runs() -> None:
    command = [sys.executable, BENCHMARKS / "low_bit_copy.py", "--tiny", "--repeats", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split("|")[1].strip() for line in ended.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["group", "---", "16"]

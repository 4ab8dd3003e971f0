"""The benchmark of launchers runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.mark.slow
def test_it_runs() -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    command = [sys.executable, BENCHMARKS / "launchers.py", "--tiny", "--repeats", "1", "--steps", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    head, *lines = ended.stdout.splitlines()
    assert head.split() == ["step", "to", "local", "workers", "beside", "start", "more"]
    assert [line.split("  ")[0].strip() for line in lines] == ["local", "attach", "ray", "ray alone"]
    assert lines[0].split()[-2:] == ["+0.0", "s"]

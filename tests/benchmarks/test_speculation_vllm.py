"""vLLM's own n-gram speculation is timed where vLLM is, and it is said where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.vllm.environment import VARIABLE, look

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speculation_vllm.py"


def ended(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--tiny", "--repeats", "1", "--lengths", "2"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=os.environ | environment
    )


@pytest.mark.slow
def test_it_runs() -> None:
    environment = look()
    if environment is None or environment.fault:
        pytest.skip("no tested vLLM: `plait doctor engines` says how it is installed")
    done = ended()
    assert done.returncode == 0, done.stderr
    assert "2 running: 0 guessed" in done.stdout
    assert "2 guessed" in done.stdout


@pytest.mark.slow
def test_without_vllm_it_says_what_to_do() -> None:
    done = ended(**{VARIABLE: "/no/such/python"})
    assert done.returncode == 2
    assert "`plait doctor engines` says how to install it" in done.stderr

"""The benchmark of vLLM behind the engine protocol runs where vLLM is, and says so where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.vllm.environment import VARIABLE, look

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm_engine.py"


def ended(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--tiny", "--dtype", "float32"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=os.environ | environment
    )


@pytest.mark.slow
def test_it_runs() -> None:
    environment = look()
    if environment is None or environment.fault:
        pytest.skip("no tested vLLM: `plait doctor engines` says how it is installed")
    done = ended()
    assert done.returncode == 0, done.stderr
    assert "vllm against plait: " in done.stdout
    assert "4 of 4 samples are the same to the last token" in done.stdout


@pytest.mark.slow
def test_without_vllm_it_says_what_to_do() -> None:
    done = ended(**{VARIABLE: "/no/such/python"})
    assert done.returncode == 2
    assert "`plait doctor engines` says how to install it" in done.stderr

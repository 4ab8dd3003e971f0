"""Benchmarks that start vLLM, run as their users run them: with it, and where it is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from plait.vllm.environment import VARIABLE, look
from tests.benchmarks.scripts import BENCHMARKS

MOST_S = 900


def output_of(script: str, *arguments: str) -> str:
    """What a benchmark says; the test is skipped where no vLLM is that plait is tested with."""
    environment = look()
    if environment is None or environment.fault:
        pytest.skip("no tested vLLM: `plait doctor engines` says how it is installed")
    done = _ended(script, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_it_says_what_to_do(script: str, *arguments: str) -> None:
    """Where vLLM is not."""
    done = _ended(script, *arguments, **{VARIABLE: "/no/such/python"})
    assert done.returncode == 2
    assert "`plait doctor engines` says how to install it" in done.stderr


def _ended(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
        env=os.environ | environment,
    )

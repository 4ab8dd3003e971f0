"""Benchmarks that start vLLM, run as their users run them: with it, and where it is not."""

from __future__ import annotations

import pytest

from plait.vllm.environment import VARIABLE, look
from tests.benchmarks import scripts


def output_of(script: str, *arguments: str) -> str:
    """What a benchmark says; the test is skipped where no vLLM is that plait is tested with."""
    environment = look("cpu")
    if environment is None or environment.fault("cpu"):
        pytest.skip("no tested vLLM: `plait doctor engines` says how it is installed")
    return scripts.output_of(script, *arguments)


def check_it_says_what_to_do(script: str, *arguments: str) -> None:
    """Where vLLM is not."""
    done = scripts.ended(script, *arguments, **{VARIABLE: "/no/such/python"})
    assert done.returncode == 2
    assert "`plait doctor engines` says how to install it" in done.stderr

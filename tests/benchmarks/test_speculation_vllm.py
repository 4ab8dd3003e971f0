"""vLLM's own n-gram speculation is timed where vLLM is, and it is said where it is not."""

from __future__ import annotations

import pytest

from tests.benchmarks.vllm_scripts import check_it_says_what_to_do, output_of

COMMAND = ("speculation_vllm.py", "--tiny", "--repeats", "1", "--lengths", "2")


@pytest.mark.slow
def test_it_runs() -> None:
    said = output_of(*COMMAND)
    assert "2 running: 0 drafted" in said
    assert "2 drafted" in said


@pytest.mark.slow
def test_without_vllm_it_says_what_to_do() -> None:
    check_it_says_what_to_do(*COMMAND)

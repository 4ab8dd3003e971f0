"""The benchmark of vLLM behind the engine protocol runs where vLLM is, and says so where it is not."""

from __future__ import annotations

import pytest

from tests.benchmarks.vllm_scripts import check_it_says_what_to_do, output_of

COMMAND = ("vllm_engine.py", "--tiny", "--dtype", "float32")


@pytest.mark.slow
def test_it_runs() -> None:
    said = output_of(*COMMAND)
    assert "vllm against plait: " in said
    assert "4 of 4 samples are the same to the last token" in said


@pytest.mark.slow
def test_without_vllm_it_says_what_to_do() -> None:
    check_it_says_what_to_do(*COMMAND)

"""The benchmark of prompts that begin alike runs, and counts what is computed of them."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    """Four prompts of 44 tokens, of which the first 40, two blocks, are common."""
    printed = output_of("common_prompts.py", "--tiny", "--repeats", "1", "--dtype", "float32")
    found = re.findall(r"(\w+): 4 prompts of 176 tokens; computed (\d+) in .* alike, (\d+) in", printed)
    assert found == [("step", str(44 + 3 * 12), "176")] * 2

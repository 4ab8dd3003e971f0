"""The benchmark of truncated sampling runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    printed = output_of("sampling.py", "--tiny", "--repeats", "1", "--tokens", "8")
    assert printed.count("top_k 50, top_p 0.9") == 2

"""The benchmark of launchers runs."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import output_of


@pytest.mark.slow
def test_it_runs() -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    head, *lines = output_of("launchers.py", "--tiny", "--repeats", "1", "--steps", "1").splitlines()
    assert head.split() == ["step", "to", "local", "workers", "beside", "start", "more"]
    assert [line.split("  ")[0].strip() for line in lines] == ["local", "beside ray", "attach", "ray", "ray alone"]
    assert lines[0].split()[-2:] == ["+0.0", "s"]

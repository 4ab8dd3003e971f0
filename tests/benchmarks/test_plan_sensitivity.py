"""The benchmark of plans that are found by wrong numbers runs."""

from __future__ import annotations

import re

import pytest

from tests.benchmarks.scripts import ended, output_of


@pytest.mark.slow
def test_no_plan_is_better_than_the_best_there_is() -> None:
    """Each of seven numbers is smaller and larger once; a slower machine takes longer by the same plan."""
    printed = output_of("plan_sensitivity.py", "--tiny", "--repeats", "1")
    rows = re.findall(r"^  (\S.*?) x (0\.7|1\.3) +([\d.]+) s +([\d.]+) s +\+([\d.]+)%", printed, re.MULTILINE)
    assert len(rows) == 14
    assert all(float(best) <= float(kept) for _, _, kept, best, _ in rows)
    kept_s = {(name, factor): float(kept) for name, factor, kept, _, _ in rows}
    for name in ("products", "memory bandwidth", "links within a node", "links between nodes"):
        assert kept_s[name, "0.7"] >= kept_s[name, "1.3"]
    assert kept_s["least seconds of a layer", "0.7"] < kept_s["least seconds of a layer", "1.3"]
    near = sum(float(lost) <= 5 for *_, lost in rows)
    assert f"within 5% of the best plan: {near} of 14" in printed


def test_a_number_cannot_be_wrong_by_all_of_it() -> None:
    done = ended("plan_sensitivity.py", "--by", "1")
    assert done.returncode == 2
    assert "--by: expected a share between 0 and 1, found 1" in done.stderr

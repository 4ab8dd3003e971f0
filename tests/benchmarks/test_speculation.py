"""The benchmark of speculation runs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from plait.data.records import Prompt
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.speculator import Speculator
from plait.kernels.noise import NoiseKey
from plait.speculation.counts import Counts
from plait.speculation.drafter import PoolDrafter
from tests.benchmarks.scripts import output_of


def test_it_runs() -> None:
    lines = output_of("speculation.py", "--tiny", "--lengths", "2", "--repeats", "1").splitlines()
    rows = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    assert rows == ["drafted", "---", "off", "2", "auto", "off again", "2, draft model", "auto, draft model"]
    (asked,) = (line for line in lines if line.startswith("| 2, draft model"))
    assert "model 100%" in asked, "the policy is always right about itself"


def test_the_ideal_by_hand(imported: Callable[[str], ModuleType]) -> None:
    """One sample; half of the steps have a draft, whose first token was accepted in 3 of 5, the second in 2. Steps of
    1, 2 and 3 rows take 1.0, 1.2 and 1.4 s: 1.3 tokens in 1.1 s, or 1.5 in 1.2."""
    bench = imported("speculation")
    counts = Counts(steps=10, steps_with_drafts=5, rows=5)
    counts.tried_at[:2], counts.accepted_at[:2] = [5, 3], [3, 2]
    auto = Speculator("adaptive", PoolDrafter(1 << 20))
    for _ in range(20):
        for rows in (1, 2, 3):
            auto.speculation.cost.observe(rows, 8, 0.8 + 0.2 * rows)
    asked = Request(Prompt(0, "a", (1, 2)), 1, Sampling(max_tokens=12), NoiseKey(0, 0))
    longest = SimpleNamespace(speculation=counts)
    ideal, length = bench.ideal_of(longest, SimpleNamespace(speculates=auto), [asked])
    assert length == 2
    assert ideal == pytest.approx(1.5 / 1.2, rel=0.02)
    longest.speculation = Counts(steps=10)
    assert bench.ideal_of(longest, SimpleNamespace(speculates=auto), [asked]) == (1.0, 0)

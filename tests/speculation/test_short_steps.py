"""`adaptive` where steps are short, as a GPU's are: a look takes a tenth of a step or, where the host has to wait for
what the samples have said, two fifths. At the clock of test_windows.py."""

from __future__ import annotations

from typing import Self

import numpy as np
import pytest

from plait.speculation.drafter import Asked, DraftTokens
from plait.speculation.pool import FloatArray
from plait.speculation.probes import MOST_LOOKS, PROBED, PROBES, Probes
from plait.speculation.speculation import Speculation
from tests.cases import slow_but
from tests.speculation.played import slowest_window
from tests.speculation.test_windows import CURVES, FOUND, LOOKING_S, Engine

CURVES["H100"] = np.array([1, 4, 16, 64, 256, 1024]), np.array([2.30, 2.36, 2.44, 2.67, 3.93, 11.49])
"""Measured with 1.5 billion parameters (benchmarks/README.md) up to 256 rows; beyond, half as steep again."""
WAITED_S = 1.1e-3
"""A look in which the device is waited for."""


class Short(Engine):
    """Steps of an H100."""

    def __init__(self, num_samples: int, chance: float, look_s: float, *, may_lose: float = 0.02) -> None:
        super().__init__(num_samples, "none", "H100")
        self.chance, self.look_s = lambda slot, step: chance, look_s
        self.speculation = Speculation("adaptive", self, lambda: self.clock_s, may_lose=may_lose)
        for slot in range(num_samples):
            self.speculation.begin(slot, (1, 2, 3))

    def propose(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> DraftTokens:
        self.clock_s += self.look_s - LOOKING_S
        return super().propose(asked, most, acceptance_C, least)

    def run(self, steps: int) -> Self:
        super().run(steps)
        return self

    def between(self, since: int, until: int) -> float:
        """Times as fast as plain decoding in these steps."""
        plain, taken = np.array(self.steps[since:until]).sum(0)
        return float(plain / taken)


def ideal(num_samples: int, chance: float, look_s: float) -> float:
    """Times as fast as plain decoding with the best fixed length, looks included."""
    milliseconds, best = lambda rows: float(np.interp(rows, *CURVES["H100"])), 1.0
    for length in range(1, 16):
        tokens = 1 + FOUND * sum(chance**place for place in range(1, length + 1))
        taken = milliseconds(num_samples * (1 + FOUND * length)) + 1e3 * look_s
        best = max(best, tokens * milliseconds(num_samples) / taken)
    return best


@pytest.mark.parametrize(
    ("num_samples", "chance"), slow_but([(64, 0.7)], [(24, 0.7), (64, 0.7), (64, 0.5), (128, 0.8), (24, 0.5)])
)
def test_a_cold_run_drafts_as_it_should_after_a_hundred_steps(num_samples: int, chance: float) -> None:
    """With 64 it took 200 steps until anything was gained, when looks were seldom until something was."""
    engine, best = Short(num_samples, chance, LOOKING_S).run(250), ideal(num_samples, chance, LOOKING_S)
    assert engine.between(100, 250) > 0.94 * best
    assert slowest_window(engine.steps) > 0.975


@pytest.mark.parametrize(
    ("num_samples", "look_s"),
    slow_but([(64, LOOKING_S)], [(num, look_s) for num in (24, 64, 256) for look_s in (LOOKING_S, WAITED_S)]),
)
def test_where_nothing_comes_true_learning_costs_no_more_than_two_percent(num_samples: int, look_s: float) -> None:
    """Later a look in 32 steps is left, which alone is 1.3 percent where it is waited for."""
    engine = Short(num_samples, 0.0, look_s).run(400)
    assert slowest_window(engine.steps) > 0.975
    assert engine.between(200, 400) > (0.99 if look_s == LOOKING_S else 0.985)


@pytest.mark.parametrize("num_samples", slow_but([64], [24, 64]))
def test_where_a_look_takes_two_fifths_of_a_step_whoever_may_lose_a_tenth_gains(num_samples: int) -> None:
    """Two percent of 32 steps are one look and a few rows."""
    best = ideal(num_samples, 0.7, WAITED_S)
    assert Short(num_samples, 0.7, WAITED_S, may_lose=0.1).run(250).between(100, 250) > 0.94 * best


def test_looks_for_trials_that_are_never_covered_come_to_an_end() -> None:
    probes, none = Probes(), np.array([True, *[False] * 64])
    wanted = []
    for _ in range(3 * MOST_LOOKS):
        wanted.append(probes.is_wanted(40))
        assert probes.more(40, none) == 0
    assert wanted == [True] * MOST_LOOKS + [False] * (2 * MOST_LOOKS)
    assert probes.is_wanted(80), "of another power of two nothing was tried"


def test_the_smallest_trial_that_is_missing_is_looked_for() -> None:
    """A quarter more rows twice, then half as many more; once these are known, none."""
    probes, all_covered = Probes(), np.ones(41, bool)
    fewest = []
    while probes.is_wanted(40):
        fewest.append((probes.fewest(40), probes.more(40, all_covered)))
    assert fewest == [(10, 10)] * PROBES + [(20, 20)] * PROBES
    assert len(PROBED) == 3

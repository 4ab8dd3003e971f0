"""A draft model whose seconds count, over simulated engines: it is asked where that pays, and hardly else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.speculation.drafter import Asked, DraftTokens, drafted_cells
from plait.speculation.pool import FloatArray, IntArray
from plait.speculation.promise import MAY_LOSE
from plait.speculation.speculation import How
from tests.cases import examples, slow_but
from tests.speculation.played import Forgetful, slowest_window
from tests.speculation.test_speculation import Simulated
from tests.speculation.test_windows import CURVES

THINKING_S = 5e-5


class Model(Forgetful):
    """A CostlyDrafter that is right in so many places.

    Args:
        right: share of the tokens that it drafts right, if all before were right.
        token_s: seconds of each token of the drafts; what it catches up with takes a hundredth for each token.
    """

    capturing_s = 0.0

    def __init__(self, simulated: Simulated, right: float, token_s: float) -> None:
        self.simulated, self.right, self.token_s = simulated, right, token_s
        self.behind: dict[int, int] = {}
        self.num_drafted = 0

    def begin(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        self.behind[slot] = len(prompt_ids)

    def say(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray, probs_T: FloatArray) -> None:
        for slot, count in zip(slots_B.tolist(), counts_B.tolist(), strict=True):
            self.behind[slot] += count

    def seconds_of(self, slots_B: IntArray) -> tuple[float, float]:
        """Takes as long as finding out whether drafts pay may."""
        self.simulated.clock_s += THINKING_S
        return self._seconds_of(slots_B)

    def _seconds_of(self, slots_B: IntArray) -> tuple[float, float]:
        return sum(self.behind[slot] for slot in slots_B.tolist()) * self.token_s / 100, self.token_s

    def propose(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> DraftTokens:
        found = DraftTokens.none(len(asked.slots_B), most)
        self.simulated.clock_s += self._seconds_of(asked.slots_B)[0] + most * self.token_s
        survival_B = np.ones(len(asked.slots_B))
        for depth in range(most):
            cells_B = drafted_cells(asked.greedy_B, depth, np.full(len(survival_B), 0.45))
            survival_B = survival_B * acceptance_C[cells_B]
            for row, slot in enumerate(asked.slots_B.tolist()):
                is_right = self.simulated.random.random() < self.right
                found.token_ids_BK[row, depth] = self.simulated.said_at(slot, depth) if is_right else -1
            found.cells_BK[:, depth], found.survival_BK[:, depth] = cells_B, survival_B
        found.lengths_B[:] = most
        for slot in asked.slots_B.tolist():
            self.behind[slot] = 0
        self.num_drafted += len(asked.slots_B) * most
        return found


def with_model(
    how: How, num_samples: int, right: float, token_s: float, share: float = 0.0, may_lose: float = MAY_LOSE
) -> Simulated:
    """
    Args:
        share: of tokens that are known without it.
    """
    model = lambda simulated: Model(simulated, right, token_s)
    return Simulated(how, num_samples, share, model=model, may_lose=may_lose)


def model_of(simulated: Simulated) -> Model:
    assert isinstance(simulated.model, Model)
    return simulated.model


@settings(max_examples=examples(6, 12), deadline=None)
@given(
    right=st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0]),
    token_s=st.floats(0.0002, 0.05),
    num_samples=st.sampled_from([1, 3, 8]),
    share=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_no_32_steps_are_slower_than_two_percent(right: float, token_s: float, num_samples: int, share: float) -> None:
    """From the first step on: useless models and perfect ones, cheap ones and such as take longer than a step."""
    simulated = with_model("adaptive", num_samples, right, token_s, share)
    simulated.run(150)
    assert slowest_window(simulated.steps) > 0.98


@pytest.mark.parametrize(("right", "token_s"), slow_but([(0.5, 0.001)], [(0.6, 0.002), (0.5, 0.001)]))
def test_what_pays_by_little_is_used_as_far_as_it_is_covered(right: float, token_s: float) -> None:
    """Of a lone sample a draft in two is wrong, and then its price is gone for 32 steps; 1.3 times as fast at best."""
    simulated = with_model("adaptive", 1, right, token_s)
    simulated.run(900)
    assert slowest_window(simulated.steps) > 0.98
    assert simulated.plain > 1.02 * simulated.seconds


NO_USE = [(0.0, 0.002), (0.3, 0.006), (0.6, 0.012), (0.9, 0.02), (0.0, 0.05)]
"""(share that is right, seconds of a token)"""


@pytest.mark.parametrize(
    ("no_use", "num_samples"),
    slow_but([(NO_USE[0], 8), (NO_USE[2], 1), (NO_USE[3], 1)], itertools.product(NO_USE, [1, 8])),
)
def test_auto_is_hardly_slower_where_its_drafts_do_not_pay(no_use: tuple[float, float], num_samples: int) -> None:
    """A step takes 18 ms and 1.6 a row."""
    simulated = with_model("adaptive", num_samples, *no_use)
    simulated.run(600)
    assert slowest_window(simulated.steps) > 0.98


@pytest.mark.parametrize(("num_samples", "least"), slow_but([(1, 1.35)], [(1, 1.35), (8, 1.2)]))
def test_auto_is_faster_where_they_do(num_samples: int, least: float) -> None:
    """Two tokens at a step and more, less what drafts and rows take; fixed lengths, which stake more than may be lost,
    are 2.6 and 1.4 times as fast."""
    simulated = with_model("adaptive", num_samples, 0.9, 0.002)
    assert simulated.run(800) > least
    figures = simulated.speculation.counts.figures()
    assert figures["acceptance_of_model"] == pytest.approx(0.9, abs=0.03)
    assert figures["saved_s"] == pytest.approx(simulated.plain - simulated.seconds, rel=0.15)


STAKED = [(1, 0.9), (1, 0.7), (1, 0.3), (4, 0.8), (8, 0.9)]
"""(samples, share that is right), where two percent do not cover the best fixed length."""


@pytest.mark.parametrize(("num_samples", "right"), slow_but([STAKED[0], STAKED[1]], STAKED))
def test_who_may_lose_a_tenth_is_as_fast_as_the_best_fixed_length(num_samples: int, right: float) -> None:
    """And loses no more than that in any 32 steps, though it stakes more at a time."""
    best = max(with_model(length, num_samples, right, 0.002).run(400) for length in (1, 2, 4, 8))
    simulated = with_model("adaptive", num_samples, right, 0.002, may_lose=0.1)
    assert simulated.run(800) > 0.94 * best
    assert slowest_window(simulated.steps) > 0.9


@pytest.mark.parametrize("may_lose", [0.05, 0.1, 0.3])
@pytest.mark.parametrize(("right", "num_samples"), slow_but([(0.0, 1)], itertools.product([0.0, 0.2], [1, 8])))
def test_who_may_lose_more_hardly_does_where_drafts_are_of_no_use(
    right: float, num_samples: int, may_lose: float
) -> None:
    """A model that is not right is found out soon, and asked no more than otherwise."""
    simulated = with_model("adaptive", num_samples, right, 0.004, may_lose=may_lose)
    assert simulated.run(800) > 0.975
    assert slowest_window(simulated.steps) > 1 - may_lose


class OnEPYC(Simulated):
    """Steps as on a core of an EPYC without a matrix unit."""

    def forward_s(self, rows: int) -> float:
        return float(np.interp(rows, *CURVES["CPU"])) / 1e3


@pytest.mark.parametrize(
    ("num_samples", "least", "most"), slow_but([(1, 1.12, 1.26)], [(1, 1.12, 1.26), (8, 0.8, 0.9)])
)
def test_a_copy_that_takes_a_third_of_a_step_is_of_use_to_fixed_lengths_of_few_samples(
    num_samples: int, least: float, most: float
) -> None:
    """A copy of the policy in 4 bits whose products took as long as their bytes, right as often as it was found to be
    (docs/speculation.md). A rejected draft token would take half of what auto may lose in 32 steps, so it computes
    none."""

    def speculating(how: How) -> OnEPYC:
        token_s = 0.31 * float(np.interp(num_samples, *CURVES["CPU"])) / 1e3
        return OnEPYC(how, num_samples, 0.0, model=lambda simulated: Model(simulated, 0.61, token_s))

    assert least < max(speculating(length).run(300) for length in (1, 2)) < most
    auto = speculating("adaptive")
    assert auto.run(600) > 0.99
    assert auto.speculation.counts.figures()["drafted_steps"] < 0.01


@pytest.mark.slow
def test_auto_has_most_of_the_best_fixed_length() -> None:
    best = max(with_model(length, 2, 0.8, 0.003).run(200) for length in (1, 2, 4, 8))
    assert with_model("adaptive", 2, 0.8, 0.003).run(200) > 0.8 * best


def test_a_model_that_knows_nothing_is_asked_no_more() -> None:
    """A few drafts at first; then trials in a hundredth of the time."""
    simulated = with_model("adaptive", 4, 0.0, 0.002)
    simulated.run(100)
    model = model_of(simulated)
    asked_first = model.num_drafted
    before = simulated.seconds
    simulated.run(600)
    assert 0 < (model.num_drafted - asked_first) * model.token_s / 4 < 0.015 * (simulated.seconds - before)
    assert simulated.speculation.counts.drafted < 0.05 * asked_first + 60


def test_it_is_not_asked_for_what_is_known_anyway() -> None:
    """Half of a token's time for each draft, where nearly all are looked up."""
    simulated = with_model("adaptive", 4, 0.95, 0.008, share=0.95)
    assert simulated.run(300) > 0.97 * Simulated("adaptive", 4, 0.95).run(300)
    model = model_of(simulated)
    assert model.num_drafted < 300


def test_a_model_that_gets_better_is_noticed() -> None:
    simulated = with_model("adaptive", 2, 0.0, 0.002)
    simulated.run(150)
    model = model_of(simulated)
    model.right = 0.9
    simulated.speculation.grow_old()
    simulated.run(400)
    simulated.seconds = simulated.plain = 0.0
    assert simulated.run(100) > 1.4


def test_it_takes_the_place_of_what_is_less_likely() -> None:
    """Fixed lengths draft wherever anything is known, by whoever is more often right."""
    simulated = with_model(2, 3, 0.9, 0.001, share=0.3)
    simulated.run(200)
    prompt, siblings, history, model = simulated.speculation.counts.tried_of
    assert model > 3 * (prompt + siblings + history)

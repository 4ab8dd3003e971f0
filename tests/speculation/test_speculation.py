"""Speculation over simulated engines whose steps take known times: it drafts where that pays, and rests where not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from plait.speculation.acceptance import Acceptance
from plait.speculation.counts import Counts
from plait.speculation.drafter import Asked, CostlyDrafter, DraftTokens, PoolDrafter
from plait.speculation.pool import FloatArray
from plait.speculation.promise import MAY_LOSE
from plait.speculation.speculation import How, Speculation
from tests.cases import slow_but
from tests.speculation.played import slowest_window

PROMPT = tuple(range(200, 220))
CONTEXT = 1000
LOOKING_S = 1e-4


class Looking(PoolDrafter):
    """A pool of which a look-up takes LOOKING_S."""

    def __init__(self, simulated: Simulated) -> None:
        super().__init__(1 << 22)
        self.simulated = simulated

    def propose(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> DraftTokens:
        self.simulated.clock_s += LOOKING_S
        return super().propose(asked, most, acceptance_C, least)


class Simulated:
    """Samples that say what `say` gives, a step at a time, as an engine would; seconds are added up.

    Args:
        share: of tokens that are as in `known`; the others are not known from before.
        row_s: seconds of a row beside the 18 ms of a step; by default as on a CPU with AVX-512.
        model: makes a draft model of this.
        may_lose: see `Speculation`.
    """

    def __init__(
        self,
        how: How,
        num_samples: int,
        share: float,
        row_s: float = 0.0016,
        model: Callable[[Simulated], CostlyDrafter] | None = None,
        may_lose: float = MAY_LOSE,
    ) -> None:
        self.random, self.row_s, self.share = random.Random(3), row_s, share
        self.clock_s = 0.0
        self.model = None if model is None else model(self)
        self.speculation = Speculation(how, Looking(self), lambda: self.clock_s, model=self.model, may_lose=may_lose)
        self.num_samples, self.seconds, self.plain, self.tokens = num_samples, 0.0, 0.0, 0
        self.steps: list[tuple[float, float]] = []
        """Seconds of plain decoding for what each step gave, and its own."""
        self.known = [1000 + self.random.randrange(100_000) for _ in range(4000)]
        self.speculation.drafter.record(PROMPT, np.array(self.known), np.full(len(self.known), 0.9))
        self.said: list[list[int]] = [[] for _ in range(num_samples)]
        for slot in range(num_samples):
            self.speculation.begin(slot, PROMPT)
            self.hear(slot, 1)

    def said_at(self, slot: int, ahead: int) -> int:
        """What the sample says so many tokens further on, a function of the place."""
        place = len(self.said[slot]) + ahead
        draw = random.Random(slot * 10_007 + place)
        return self.known[place] if draw.random() < self.share else draw.randrange(1000)

    def hear(self, slot: int, count: int) -> None:
        tokens = []
        for _ in range(count):
            tokens.append(self.said_at(slot, 0))
            self.said[slot].append(tokens[-1])
        self.speculation.hear(np.array([slot]), np.array([count]), np.array(tokens), np.full(count, 0.9))

    def step(self) -> None:
        slots = np.arange(self.num_samples)
        places = np.array([len(said) for said in self.said])
        asked = Asked(slots, slots.astype(np.uint64), places, slots < 0, np.full(len(slots), 15), ())
        before = self.clock_s
        is_due = self.speculation.is_due(len(slots), CONTEXT)
        drafts = self.speculation.propose(asked, CONTEXT) if is_due else [[] for _ in slots]
        taken = self.clock_s - before + self.forward_s(len(slots) + sum(map(len, drafts)))
        drawn = 0
        for slot, draft in enumerate(drafts):
            ahead = [self.said_at(slot, at) for at in range(len(draft))]
            wrong = [at for at, token in enumerate(draft) if token != ahead[at]]
            count = 1 + (wrong[0] if wrong else len(draft))
            self.hear(slot, count)
            drawn += count
        self.speculation.done(len(slots), sum(map(len, drafts)), CONTEXT, drawn, taken)
        self.steps.append((self.forward_s(len(slots)) * drawn / len(slots), taken))
        self.plain, self.seconds = self.plain + self.steps[-1][0], self.seconds + taken

    def forward_s(self, rows: int) -> float:
        return 0.018 + self.row_s * rows

    def run(self, steps: int) -> float:
        """Times as fast as without drafts."""
        for _ in range(steps):
            self.step()
        return self.plain / self.seconds


@pytest.mark.parametrize("num_samples", [1, 8])
@pytest.mark.parametrize("share", slow_but([0.2], [0.0, 0.2, 0.5]))
def test_auto_is_hardly_slower_where_drafts_do_not_come_true(share: float, num_samples: int) -> None:
    simulated = Simulated("adaptive", num_samples, share)
    simulated.run(500)
    assert slowest_window(simulated.steps) > 0.98


@pytest.mark.parametrize(("num_samples", "least"), slow_but([(1, 2.0)], [(1, 2.0), (8, 1.25)]))
def test_auto_is_faster_where_they_do(num_samples: int, least: float) -> None:
    simulated = Simulated("adaptive", num_samples, 0.95)
    assert simulated.run(400) > least
    figures = simulated.speculation.counts.figures()
    assert figures["mean_acceptance_length"] > least
    assert figures["saved_s"] == pytest.approx(simulated.plain - simulated.seconds, rel=0.15)


@pytest.mark.slow
def test_auto_is_about_as_good_as_the_best_fixed_length() -> None:
    best = max(Simulated(length, 4, 0.85).run(400) for length in (1, 2, 4, 8))
    assert Simulated("adaptive", 4, 0.85).run(400) > 0.93 * best


def test_fixed_lengths_lose_where_nothing_comes_true_and_auto_rests() -> None:
    fixed, auto = Simulated(8, 8, 0.5, row_s=0.004), Simulated("adaptive", 8, 0.5, row_s=0.004)
    assert fixed.run(200) < 0.9
    auto.run(400)
    assert auto.speculation.counts.figures()["drafted_steps"] < 0.1


def test_shadow_drafts_teach_what_computed_ones_would_have() -> None:
    """Drafts that are only looked up are held against what is said: rows that cost so much are never computed."""
    shadow, computed = Simulated("adaptive", 4, 0.8, row_s=1.0), Simulated(8, 4, 0.8)
    shadow.run(500)
    computed.run(500)
    assert shadow.speculation.counts.drafted <= 24, "to learn what they take"
    learned = [simulated.speculation.acceptance for simulated in (shadow, computed)]
    shares = [acceptance.hits_C[:, 2].sum() / acceptance.trials_C[:, 2].sum() for acceptance in learned]
    assert shares[0] == pytest.approx(shares[1], abs=0.05)


def count_looks(simulated: Simulated) -> list[int]:
    """The steps in which drafts are looked up from now on, by their numbers."""
    pool, steps = simulated.speculation.drafter, []
    draft = pool.propose

    def counted(*args: Any) -> DraftTokens:
        steps.append(len(simulated.steps))
        return draft(*args)

    pool.propose = counted  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize(("step_s", "least", "most"), [(0.0196, 25, 29), (0.002, 4, 12)])
def test_where_nothing_is_known_drafts_are_looked_for_in_few_steps(step_s: float, least: int, most: int) -> None:
    """A look takes 0.1 ms of steps of 20 ms, half a percent, which it may take; but as nothing is found, after two it
    is looked two steps later, then three, then every fourth: some 27 of 100. Of steps of 2 ms every tenth. All of them
    are counted."""
    simulated = Simulated("adaptive", 1, 0.0)
    simulated.forward_s = lambda rows: step_s  # type: ignore[method-assign]
    looks = count_looks(simulated)
    simulated.run(100)
    assert least <= len(looks) <= most
    assert simulated.speculation.counts.steps == 100


def test_where_something_is_found_it_is_looked_at_each_step_again() -> None:
    simulated = Simulated("adaptive", 1, 0.95)
    simulated.run(60)
    simulated.share = 0.0
    simulated.run(40)
    looks = count_looks(simulated)
    simulated.run(20)
    assert 0 < len(looks) <= 6, "nothing is known"
    simulated.share = 1.0
    looks.clear()
    simulated.run(30)
    assert looks[1:] == list(range(looks[1], 150)), "from the first draft on"
    assert looks[1] <= 128, "two tokens of what is known must be said, and a look is four steps later"


class Ahead(Simulated):
    """Each step in which nothing is due begins before the one before it is done."""

    under_way, most_under_way = 0, 0

    def step(self) -> None:
        if not self.speculation.due.is_quiet:
            self.land(0)
            super().step()
            return
        self.speculation.due.passes()
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.land(1)

    def land(self, most: int) -> None:
        while self.under_way > most:
            self.under_way -= 1
            for slot in range(self.num_samples):
                self.hear(slot, 1)
            seconds = self.forward_s(self.num_samples)
            self.speculation.done(self.num_samples, 0, CONTEXT, self.num_samples, seconds)
            self.steps.append((seconds, seconds))


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_steps_that_pass_are_as_those_that_ask_and_are_told_that_nothing_is_due(share: float) -> None:
    """The same steps look, and draft the same; all of them are accounted for."""
    plain, ahead = Simulated("adaptive", 4, share), Ahead("adaptive", 4, share)
    looks = [count_looks(simulated) for simulated in (plain, ahead)]
    for simulated in (plain, ahead):
        simulated.forward_s = lambda rows: 0.002 + 0.0002 * rows  # type: ignore[method-assign]
        for _ in range(300):
            simulated.step()
    ahead.land(0)
    assert ahead.most_under_way == 2
    assert looks[0] == looks[1]
    assert 10 < len(looks[0]) < 200
    assert plain.speculation.counts.figures() == ahead.speculation.counts.figures()
    assert plain.said == ahead.said


def test_steps_under_way_together_all_look() -> None:
    """Where a step asks before the one before it is done, nobody is left unheard: who is told what a step drew, and by
    whom it was drafted, would be another one's."""
    simulated = Simulated("adaptive", 1, 0.0)
    simulated.forward_s = lambda rows: 0.002  # type: ignore[method-assign]
    simulated.run(50)
    due = [simulated.speculation.is_due(1, CONTEXT)]
    simulated.speculation.done(1, 0, CONTEXT, 1, 0.002)
    assert due == [False], "a look was a few steps ago"
    simulated.speculation.is_due(1, CONTEXT)
    for _ in range(20):
        assert simulated.speculation.is_due(1, CONTEXT)
        simulated.speculation.done(1, 0, CONTEXT, 1, 0.002)


def test_counts_add_up_and_travel_as_numbers() -> None:
    one = Simulated(4, 2, 0.9)
    one.run(50)
    counts = one.speculation.counts
    assert Counts.of(counts.numbers()).numbers() == counts.numbers()
    assert (counts + counts).since(counts).numbers() == pytest.approx(counts.numbers())
    assert counts.accepted == counts.accepted_at.sum() == counts.accepted_of.sum()
    assert counts.tried_at.sum() <= counts.drafted
    figures = counts.figures()
    assert figures["mean_acceptance_length"] == pytest.approx(1 + counts.accepted / counts.rows)
    assert figures["draft_acceptance_rate"] == pytest.approx(counts.accepted / counts.drafted)
    assert Counts().figures()["draft_tokens"] == 0


def test_what_another_has_learned_is_known_once() -> None:
    """Each cell is that of the one that has seen more: told twice, nothing counts twice."""
    here, there = Acceptance(), Acceptance()
    here.learn(np.array([0, 0, 1]), np.array([1, 0, 1]))
    there.learn(np.array([0, 2, 2, 2]), np.array([1, 1, 1, 0]))
    for _ in range(2):
        here.take(there.learned)
    trials, hits = here.learned
    assert trials[:3].tolist() == [2, 1, 3]
    assert hits[:3].tolist() == [1, 1, 2]
    there.take(here.learned)
    np.testing.assert_array_equal(there.table_C, here.table_C)

"""The bar of `auto`: no 32 consecutive steps give fewer than 0.98 of the tokens per second of plain decoding, whatever
comes of drafts, and where these are accepted most of what they may gain is gained. At a clock of its own: steps and
looks take what they are told to take."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Self

import numpy as np
import pytest

from plait.kernels.draft_lookup import CELLS, DEPTHS, SIBLING
from plait.speculation.counts import MOST_PLACES
from plait.speculation.drafter import Asked, DraftTokens
from plait.speculation.pool import FloatArray
from plait.speculation.speculation import Speculation
from tests.cases import slow_but
from tests.speculation.played import Forgetful, slowest_window

CONTEXT = 1000
LOOKING_S = 3e-4
FOUND = 0.7
"""Share of the samples, at each step, of which something is drafted."""
MEASURED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "CPU": ((1, 8, 32, 1000), (9.0, 10.5, 27.0, 692.5)),
    "CPU with a matrix unit": ((1, 32, 1000), (15.4, 26.0, 357.0)),
    "GPU": ((1, 257, 1025), (4.397, 16.429, 52.525)),
    "stairs": (tuple(range(1, 1001)), tuple(10.0 + 2.0 * -(-rows // 4) for rows in range(1, 1001))),
}
"""Rows of a step, and its milliseconds; lines between."""
CURVES = {name: (np.array(rows), np.array(taken)) for name, (rows, taken) in MEASURED.items()}
KINDS: dict[str, Callable[[int, int], float]] = {
    "none": lambda slot, step: 0.0,
    "poor": lambda slot, step: 0.25,
    "some": lambda slot, step: 0.5,
    "good": lambda slot, step: 0.8,
    "good, then none": lambda slot, step: 0.8 if step < 150 else 0.0,
    "good, then poor": lambda slot, step: 0.85 if step < 150 else 0.35,
    "good now and then": lambda slot, step: 0.9 if step // 40 % 2 == 0 else 0.0,
    "ever worse": lambda slot, step: max(0.0, 0.9 - step / 300),
    "good of half of the samples": lambda slot, step: 0.8 if slot % 2 == 0 else 0.0,
}
"""Chance that a draft of a sample is accepted if all before it are, at a step."""


class Engine(Forgetful):
    """Steps of samples of which draft tokens are accepted by chance; the Drafter of these drafts, too.

    Args:
        kind, curve: of KINDS and CURVES.
    """

    def __init__(self, num_samples: int, kind: str, curve: str, seed: int = 0) -> None:
        self.chance, self.curve, self.seed = KINDS[kind], CURVES[curve], seed
        self.random, self.clock_s = random.Random(seed), 0.0
        self.said, self.unheard = [0] * num_samples, [0] * num_samples
        self.steps: list[tuple[float, float]] = []
        """Seconds of plain decoding for what each step gave, and its own."""
        self.speculation = Speculation("adaptive", self, lambda: self.clock_s)
        for slot in range(num_samples):
            self.speculation.begin(slot, (1, 2, 3))

    def propose(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> DraftTokens:
        """Chains whose tokens are right (1) or not (2)."""
        self.clock_s += LOOKING_S
        found = DraftTokens.none(len(asked.slots_B), most)
        for row, slot in enumerate(asked.slots_B.tolist()):
            survival, confidence = 1.0, self.found(slot)
            for depth in range(min(most, int(asked.limits_B[row])) if confidence else 0):
                bucket = int(np.searchsorted(DEPTHS, depth, side="right"))
                cell = int(np.ravel_multi_index((0, SIBLING, 3, bucket, confidence), CELLS))
                survival *= acceptance_C[cell]
                if survival < least:
                    break
                found.cells_BK[row, depth], found.survival_BK[row, depth] = cell, survival
                found.token_ids_BK[row, depth] = 1 if self._is_right(slot, depth) else 2
                found.lengths_B[row] += 1
        return found

    def found(self, slot: int) -> int:
        """The confidence of what is drafted of a sample at this step; 0: nothing is."""
        return 0 if self.random.random() > FOUND else self.random.choice([5, 7, 8, 9])

    def _is_right(self, slot: int, ahead: int) -> bool:
        """Depends on the place alone, so that drafts that are not computed are as right as others."""
        draw = random.Random((self.seed * 7919 + slot) * 100_003 + self.said[slot] + ahead)
        return draw.random() < self.chance(slot, len(self.steps))

    def forward_s(self, num_rows: int) -> float:
        return float(np.interp(num_rows, *self.curve)) / 1e3

    def live(self) -> list[int]:
        """Samples of the next step."""
        return list(range(len(self.said)))

    def limit(self, slot: int) -> int:
        """Tokens of a draft of a sample at most."""
        return MOST_PLACES

    def step(self) -> None:
        live, began = self.live(), self.clock_s
        num_samples, context = len(live), CONTEXT * len(live) // len(self.said)
        slots, drafts = np.array(live), [[] for _ in live]
        if self.speculation.is_due(num_samples, context):
            counts = np.array([self.unheard[slot] for slot in live])
            heard, total = counts > 0, int(counts.sum())
            self.speculation.hear(slots[heard], counts[heard], np.ones(total, np.int64), np.full(total, 0.9))
            limits, places = (np.array([of(slot) for slot in live]) for of in (self.limit, self.said.__getitem__))
            for slot in live:
                self.unheard[slot] = 0
            asked = Asked(slots, slots.astype(np.uint64), places, slots < 0, limits, ())
            drafts = self.speculation.propose(asked, context)
        num_drafted, drawn = sum(map(len, drafts)), 0
        self.clock_s += self.forward_s(num_samples + num_drafted)
        for slot, draft in zip(live, drafts, strict=True):
            count = 1 + next((at for at, token in enumerate(draft) if token != 1), len(draft))
            self.said[slot] += count
            self.unheard[slot] += count
            drawn += count
        if num_drafted == 0:
            self.speculation.not_computed(slots)
        taken = self.clock_s - began
        self.speculation.done(num_samples, num_drafted, context, drawn, taken)
        self.steps.append((self.forward_s(num_samples) * drawn / num_samples, taken))

    def run(self, steps: int) -> Self:
        for _ in range(steps):
            self.step()
        return self

    def speed(self, since: int) -> float:
        """Times as fast as plain decoding from a step on."""
        plain, taken = np.array(self.steps[since:]).sum(0)
        return float(plain / taken)


def ideal(num_samples: int, chance: float, curve: str) -> float:
    """Times as fast as plain decoding with the best fixed length, if looking up took no time and each step had as many
    drafts as the mean."""
    seconds, best = lambda rows: float(np.interp(rows, *CURVES[curve])), 1.0
    for length in range(1, 9):
        tokens = 1 + FOUND * sum(chance**place for place in range(1, length + 1))
        best = max(best, tokens * seconds(num_samples) / seconds(num_samples * (1 + FOUND * length)))
    return best


QUICK = [
    ("none", 1, "GPU"),
    ("poor", 4, "CPU"),
    ("some", 4, "stairs"),
    ("good, then none", 1, "CPU"),
    ("good, then none", 8, "CPU with a matrix unit"),
    ("good now and then", 8, "stairs"),
    ("good of half of the samples", 4, "CPU"),
]


@pytest.mark.parametrize(
    ("kind", "num_samples", "curve"), slow_but(QUICK, itertools.product(KINDS, (1, 4, 8, 32), CURVES))
)
def test_no_32_steps_are_slower_than_two_percent(kind: str, num_samples: int, curve: str) -> None:
    """Drafts that always were accepted and suddenly do not were 0.5 to 0.9 times as fast for 32 steps, when what was
    sure to gain needed no cover. Of more than 16 samples several numbers share one time."""
    least = 0.98 if num_samples <= 16 else 0.975
    for seed in range(2):
        assert slowest_window(Engine(num_samples, kind, curve, seed).run(330).steps) > least


class Ending(Engine):
    """Rollouts one after another, with new weights between: samples of 20 to 160 tokens, which end one by one."""

    def __init__(self, num_samples: int, kind: str, curve: str, seed: int = 0) -> None:
        super().__init__(num_samples, kind, curve, seed)
        self.ends = [0] * num_samples

    def live(self) -> list[int]:
        found = [slot for slot, end in enumerate(self.ends) if self.said[slot] < end]
        if found:
            return found
        lengths = random.Random(self.seed * 31 + len(self.steps))
        for slot, count in enumerate(self.said):
            self.ends[slot], self.unheard[slot] = count + lengths.randint(20, 160), 0
            self.speculation.end(slot)
            self.speculation.begin(slot, (1, 2, 3))
        self.speculation.grow_old()
        return list(range(len(self.said)))

    def limit(self, slot: int) -> int:
        return min(MOST_PLACES, self.ends[slot] - self.said[slot] - 1)


SMOOTH = [curve for curve in CURVES if curve != "stairs"]
QUICK_ENDING = [
    ("poor", 8, "CPU with a matrix unit"),
    ("good now and then", 8, "CPU with a matrix unit"),
    ("good of half of the samples", 8, "GPU"),
]


@pytest.mark.parametrize(
    ("kind", "num_samples", "curve"), slow_but(QUICK_ENDING, itertools.product(KINDS, (2, 4, 8, 32), SMOOTH))
)
def test_where_samples_end_no_32_steps_are_slower_than_two_percent(kind: str, num_samples: int, curve: str) -> None:
    """The first step of a number of samples that there never was has no drafts, or some would have 0.975. Beyond 16
    samples several numbers are taken for one."""
    least = 0.98 if num_samples <= 16 else 0.976
    for seed in range(2):
        assert slowest_window(Ending(num_samples, kind, curve, seed).run(400).steps) > least


def test_the_first_step_of_so_many_samples_has_no_drafts() -> None:
    """What it takes is not known but by the fit; then it is, also in rollouts that follow."""
    engine, drafted, firsts = Ending(4, "good", "CPU"), [0], []
    draft = engine.speculation.propose

    def counted(asked: Asked, num_context: int) -> list[list[int]]:
        drafts = draft(asked, num_context)
        drafted[-1] = sum(map(len, drafts))
        return drafts

    engine.speculation.propose = counted  # type: ignore[method-assign]
    for number in range(300):
        if not engine.speculation.cost.is_measured(len(engine.live())):
            firsts.append(number)
        engine.step()
        drafted.append(0)
    assert firsts[0] == 0
    assert len(firsts) <= 4, "of 4, 3, 2 samples and of one; as many rows may have been measured before"
    assert not any(drafted[number] for number in firsts)
    assert sum(drafted[150:]) > 50


@pytest.mark.parametrize(
    ("num_samples", "curve"),
    slow_but(
        [(1, "CPU with a matrix unit"), (8, "CPU")], itertools.product((1, 4, 8), ("CPU", "CPU with a matrix unit"))
    ),
)
def test_where_they_come_true_most_is_gained(num_samples: int, curve: str) -> None:
    """As code at temperature 0.3: 1.5 times as fast and more, where that is possible at all."""
    best = ideal(num_samples, 0.8, curve)
    found = Engine(num_samples, "good", curve).run(500).speed(since=150)
    assert found > 0.85 * best
    assert found > min(1.5, 0.9 * best)


@pytest.mark.parametrize("kind", ["none", "poor"])
def test_short_answers_of_which_nothing_comes_true_cost_half_a_percent(kind: str) -> None:
    """As the demo's: 16 tokens, 32 samples at a time, then others, new weights after every second wave. A look takes
    a hundredth of a step, so every third step has one; nothing of it begins anew with a wave."""
    engine = Engine(32, kind, "CPU")
    looks, draft = [], engine.propose
    engine.propose = lambda *asked: looks.append(len(engine.steps)) or draft(*asked)  # type: ignore[method-assign]
    for wave in range(40):
        engine.run(16)
        for slot in range(32):
            engine.speculation.end(slot)
            engine.speculation.begin(slot, (wave, 2, 3))
            engine.unheard[slot] = 0
        if wave % 2:
            engine.speculation.grow_old()
    seconds = sum(taken for _, taken in engine.steps)
    assert len(looks) < 0.3 * len(engine.steps)
    assert len([step for step in looks if step >= 320]) <= 0.55 * len(looks)
    assert engine.speculation.counts.drafting_s < 0.005 * seconds
    assert slowest_window(engine.steps) > 0.98
    assert engine.speed(since=0) > 0.995


class Noisy(Engine):
    """Steps whose seconds vary by 3 % (one standard deviation), alike whatever they compute."""

    def step(self) -> None:
        self.pace = max(0.5, random.Random(self.seed * 7919 + len(self.steps)).gauss(1.0, 0.03))
        super().step()

    def forward_s(self, num_rows: int) -> float:
        return self.pace * super().forward_s(num_rows)


@pytest.mark.slow
def test_seconds_that_vary_cost_half_a_percent_more() -> None:
    """Against plain steps of the same seconds; against those of a clock that does not vary even plain decoding has
    windows of 0.981. What is gained by chance is spent, too: that is the half percent. To account by what the fit
    predicts in place of what was measured has 0.974 where this has 0.975."""
    for kind, num_samples, curve in (
        ("none", 1, "CPU"),
        ("good, then none", 8, "CPU with a matrix unit"),
        ("good now and then", 8, "CPU with a matrix unit"),
    ):
        assert slowest_window(Noisy(num_samples, kind, curve).run(330).steps) > 0.97


def test_steps_under_way_together_do_not_stake_the_same_seconds() -> None:
    """As where stages pass steps on: what one that is not done may lose, the next one does not have."""
    engine = Engine(8, "good", "CPU").run(100)
    room_s, slots, limits, staked_s = (
        engine.speculation.margin.room_s(engine.forward_s(8)),
        np.arange(8),
        np.full(8, 15),
        0.0,
    )
    asked = Asked(slots, slots.astype(np.uint64), np.array(engine.said), slots < 0, limits, ())
    for _ in range(12):
        assert engine.speculation.is_due(8, CONTEXT)
        rows = 8 + sum(map(len, engine.speculation.propose(asked, CONTEXT)))
        staked_s += engine.forward_s(rows) - engine.forward_s(8)
    assert 0.5 * room_s < staked_s < 1.01 * room_s

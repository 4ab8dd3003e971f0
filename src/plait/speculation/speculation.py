"""Speculation of one engine: drafts for its running samples, as many as will pay, learning from each step.

`adaptive` looks drafts up, chooses by acceptance and cost, and computes a few that it does not believe in to learn what
so many rows take (`sampling.speculation` auto is the same, where drafts change no bit). Where drafts do not pay, they
are looked up seldom, which is enough to notice when they would. A draft model is asked beside, where its drafts are
expected to pay for its seconds, too (`costly`). All of it together may lose two percent of any 32 steps (`margin`).
What it chooses depends on seconds that were measured; what samples say does not depend on what it chooses.

Shapes: B running samples, T tokens said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from plait.kernels.draft_lookup import CELLS, NUM_SOURCES
from plait.speculation import choice
from plait.speculation.acceptance import Acceptance
from plait.speculation.choice import Choice, Room
from plait.speculation.costly import Costly, LookedUp, Wanted
from plait.speculation.counts import Counts
from plait.speculation.drafter import Asked, CostlyDrafter, Drafter, DraftTokens
from plait.speculation.due import Due
from plait.speculation.kept_drafts import KeptDrafts
from plait.speculation.ledger import Counted, Ledger, Spent
from plait.speculation.pool import FloatArray, IntArray
from plait.speculation.probes import PROBES, Probes
from plait.speculation.promise import MAY_LOSE

How = int | Literal["adaptive"]
"""Tokens of a draft, or as many as pay."""

AUTO_MOST = 15
"""Tokens of a draft that `adaptive` looks up."""
LITTLE = 0.75
"""Share of what drafts gain otherwise, below which a step without them, which shows what it takes, is done now."""
_PER_SOURCE = CELLS[2] * CELLS[3] * CELLS[4]


class Speculation:
    """Drafts for samples that are known by slots.

    Args:
        how: tokens of every draft, or "adaptive".
        drafter: where drafts are looked up.
        clock: seconds.
        model: whose drafts take seconds that count; None: there is none.
        may_lose: share of the time of any WINDOW steps that "adaptive" may lose by drafts.
    """

    def __init__(
        self,
        how: How,
        drafter: Drafter,
        clock: Callable[[], float] = time.perf_counter,
        *,
        model: CostlyDrafter | None = None,
        may_lose: float = MAY_LOSE,
    ) -> None:
        self.drafter, self.acceptance, self.ledger = drafter, Acceptance(), Ledger(may_lose)
        self.cost, self.margin, self._counts = self.ledger.cost, self.ledger.margin, self.ledger.counts
        self._clock, self.is_adaptive = clock, how == "adaptive"
        self._most = AUTO_MOST if how == "adaptive" else how
        self._drafters: list[Drafter] = [drafter] if model is None else [drafter, model]
        self.costly = None if model is None else Costly(model, self._most, self.acceptance, self.ledger)
        self._kept = KeptDrafts(self._most)
        self.probes = Probes()
        self.due = Due(self.ledger, self.costly, is_adaptive=self.is_adaptive)
        # This step.
        self._began, self._heard_from = 0.0, 0.0
        """When it asked whether drafts are due, and when its samples began to be heard."""
        self._looks, self._thinks = False, False
        """Whether drafts are looked up, and whether the model is thought of."""
        self._wanted: Wanted | None = None
        """What the model was asked for."""
        self._drafted_s, self._last_s = 0.0, 0.0
        """Seconds of the model; of all that drafts took, in the last step in which they were due."""
        self._is_open = False
        """Whether drafts were computed of which nothing was heard."""
        self._spent = Spent()
        """What was spent on drafts and is not accounted for yet."""

    @property
    def counts(self) -> Counts:
        """How it went, all steps so far included."""
        return self.ledger.counts

    def begin(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """A sample of a prompt begins in a slot."""
        self._kept.clear(slot)
        for drafter in self._drafters:
            drafter.begin(slot, prompt_ids)

    def end(self, slot: int) -> None:
        """The sample in a slot says nothing more."""
        self._kept.clear(slot)
        for drafter in self._drafters:
            drafter.end(slot)

    def hear(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray, probs_T: FloatArray) -> None:
        """What samples have said since they were heard last; see `Drafter.say`."""
        trials = self._kept.hear(slots_B, counts_B, token_ids_T)
        if len(trials):
            self.acceptance.learn(trials.cells_X, trials.hits_X)
        if trials.num_computed:
            is_computed_X = trials.places_X >= 0
            sources = trials.cells_X[is_computed_X] // _PER_SOURCE % NUM_SOURCES
            self._counts.computed(sources, trials.places_X[is_computed_X], trials.hits_X[is_computed_X])
        for drafter in self._drafters:
            drafter.say(slots_B, counts_B, token_ids_T, probs_T)

    def grow_old(self) -> None:
        """The policy has changed."""
        self.acceptance.forget()
        for drafter in self._drafters:
            drafter.grow_old()

    def is_due(self, num_samples: int, num_context: int) -> bool:
        """Whether drafts are looked for in this step. If so, what the samples have said must be heard, and `propose`
        called; if not, neither need be: what is heard later is heard at once.

        Args:
            num_samples: that run.
            num_context: tokens that they hold.
        """
        return self.due.begin() and self._looks_for(num_samples, num_context)

    def _looks_for(self, num_samples: int, num_context: int) -> bool:
        began = self._clock()
        self.ledger.account()
        self._began = self._clock()
        self._spent.before_s += self._began - began
        self._counts.drafting_s += self._began - began
        self._drafted_s, self._wanted = 0.0, None
        self._looks = self.due.of_pool(num_samples, num_context)
        self._thinks = self.due.of_model(num_samples, num_context)
        if self._looks or self._thinks or self._is_open or self.due.overlaps:
            self._heard_from = self._clock()
            return True
        self._looked()
        return False

    def propose(self, asked: Asked, num_context: int) -> list[list[int]]:
        """Drafts that are to be computed, one for each sample that was asked for; empty ones, where none pays. Only in
        a step in which `is_due` has said so.

        Args:
            num_context: tokens that the samples hold.
        """
        heard_s = self._clock() - self._heard_from
        count, proposed = len(asked.slots_B), None
        drafts: list[list[int]] = [[] for _ in range(count)]
        if self._looks:
            proposed = self.drafter.propose(asked, self._most, self.acceptance.table_C, self._least(count, num_context))
        if self.costly is not None and self._thinks:
            proposed = self._drafted(self.costly, asked, proposed, num_context)
        self._is_open = False
        if proposed is not None and self._found(proposed.num_tokens):
            lengths_B = self._chosen(proposed, num_context).lengths_B
            self._kept.keep(asked.slots_B, proposed, lengths_B)
            for row in lengths_B.nonzero()[0].tolist():
                drafts[row] = proposed.token_ids_BK[row, : lengths_B[row]].tolist()
                self._is_open = True
        self._looked()
        # What was said in steps between is heard at once: of that each step has its share.
        more_s = heard_s * (1 - 1 / max(1, self.due.heard()))
        if self._looks:
            self.due.looking.took(max(0.0, self._last_s - self._drafted_s - more_s))
        return drafts

    def _looked(self) -> None:
        """What it took counts, from the question whether drafts are due to their choice."""
        self._last_s = self._clock() - self._began
        self._spent.looking_s += self._last_s - self._drafted_s
        self._spent.drafted_s += self._drafted_s
        self._counts.drafting_s += self._last_s

    def not_computed(self, slots_B: IntArray) -> None:
        """A step of these samples has computed no drafts: there were none, or no room for them."""
        self._kept.not_computed(slots_B)

    def done(self, num_rows: int, num_drafted: int, num_context: int, num_drawn: int, seconds: float) -> None:
        """A step of nothing but running samples took so long, looking up included.

        Args:
            num_rows: samples.
            num_drafted: drafts that it computed behind their newest tokens.
            num_context: tokens that they held.
            num_drawn: tokens that they got.
        """
        is_quiet = self.due.end(num_drafted)
        if num_rows == 0:
            return
        if is_quiet:
            self.ledger.quiet(num_rows, num_context, seconds)
            return
        began = self._clock()
        is_paid = self._wanted is not None and not self._wanted.is_trial
        step = Counted(
            num_rows, num_drafted, num_context, num_drawn, seconds, alone_s=max(seconds - self._last_s, 1e-9)
        )
        self.ledger.done(step, self._spent, is_paid=is_paid)
        self._settled(began)

    def mixed(self, num_rows: int, num_drafted: int, num_context: int, seconds: float) -> None:
        """A step that computed prompts beside running samples took so long; see `done`. What its drafts gained is not
        told from what the prompts took, and does not count."""
        if self.due.end(num_drafted):
            self.ledger.quiet(0, 0, seconds)
            return
        began = self._clock()
        self.ledger.mixed(num_rows, num_drafted, num_context, seconds, self._spent)
        self._settled(began)

    def _settled(self, began: float) -> None:
        """A step is accounted for, which took from then on; that counts with the next one."""
        self.due.settle(looked=self._looks, is_open=self._is_open)
        self._spent = Spent(before_s=self._clock() - began)
        self._counts.drafting_s += self._spent.before_s

    def _knows_plain(self, num_samples: int) -> bool:
        """Whether a step of so many samples without drafts, or one of as many rows, was measured. By the fit alone it
        may seem to take some hundredths more than it does; that much each step with drafts would lose unseen."""
        return self.cost.num_steps >= PROBES and self.cost.is_measured(num_samples)

    def _least(self, num_samples: int, num_context: int) -> float:
        """Survival below which drafts are not looked up any further."""
        if not self.is_adaptive:
            return 0.0
        known = self.probes.is_known(num_samples)
        return choice.least_survival(self.cost, num_samples, num_context) if known else choice.LEAST_SURVIVAL

    def _drafted(
        self, costly: Costly, asked: Asked, proposed: DraftTokens | None, num_context: int
    ) -> DraftTokens | None:
        """What was looked up, with what the model proposes, where that is asked."""
        count = len(asked.slots_B)
        if self.is_adaptive and not self._knows_plain(count):
            return proposed
        looked_up = DraftTokens.none(count, self._most) if proposed is None else proposed
        looked_at = self._clock()
        alone = LookedUp.of(looked_up, self.cost, num_context, looked_at - self._began)
        if self.is_adaptive:
            may_pay = self.ledger.may_draft
            wanted = costly.wanted(asked, alone, may_pay=may_pay)
        else:
            wanted = Wanted(np.arange(count), self._most, 0.0, 0.0)
        thought = self._clock()
        if wanted is not None:
            if proposed is not None:
                self.due.gained(max(0.0, alone.gain - 1.0))
            proposed = costly.propose(asked, wanted, looked_up)
            self._drafted_s, self._wanted = self._clock() - thought, wanted
            self._counts.model_passes += wanted.depth
        costly.took(wanted, thought - looked_at, self._drafted_s)
        return proposed

    def _found(self, num_tokens: int) -> bool:
        """Whether there is a draft token to verify; an adaptive engine notes a gain of 0 if not, or if it knows too
        little of steps to tell what pays."""
        if self.is_adaptive and (num_tokens == 0 or self.cost.num_steps < PROBES):
            self.due.gained(0.0)
            self.due.learns = False
        return num_tokens > 0

    def _chosen(self, proposed: DraftTokens, num_context: int) -> Choice:
        """Which of the drafts are computed, of which there are some."""
        num_samples, num_tokens = len(proposed.lengths_B), proposed.num_tokens
        if not self.is_adaptive:
            return Choice(proposed.lengths_B, 1.0)
        if not self._knows_plain(num_samples):
            return choice.nothing(num_samples)
        rows_M1 = np.arange(num_samples, num_samples + num_tokens + 1)
        seconds_M1 = self.cost.seconds(rows_M1, num_context)
        wanted, plain_s = self._wanted, float(seconds_M1[0])
        looking_s = self.due.looking.seconds
        looks_s = self._spent.before_s + self._drafted_s + looking_s
        prices_M1 = self.cost.most(rows_M1, num_context) - plain_s
        self.due.learns = choice.might_pay(proposed, plain_s, looking_s) and self.probes.is_wanted(num_samples)
        least = min(self.probes.fewest(num_samples), num_tokens) if self.due.learns else 1
        self.due.least_price_s = float(prices_M1[least])
        room_s = self.margin.room_s(plain_s, once_s=looks_s + self.due.staked_s)
        room = Room.of(room_s, num_samples, looking_s) if wanted is None else Room(room_s)
        # What the model's drafts took, those of the next step will, too.
        more_s = 0.0 if wanted is None else wanted.seconds
        weighed = choice.weigh(proposed, seconds_M1, prices_M1, room, more_s=more_s)
        if not self.ledger.is_cold and (probed := self.probes.more(num_samples, prices_M1 <= room_s)):
            chosen = choice.first(weighed.samples_M, probed, num_samples)
        else:
            may_draft, worth = self.ledger.may_draft, weighed.best.worth
            if wanted is None:
                may_draft &= not self.ledger.wants_plain or worth >= LITTLE * self.due.gain
                self.due.gained(worth)
            chosen = weighed.best if may_draft else choice.nothing(num_samples)
        self.due.stake(looks_s + float(prices_M1[chosen.lengths_B.sum()]))
        return chosen

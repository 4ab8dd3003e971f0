"""When a draft model is asked: where its drafts are expected to pay for its seconds and for the rows that they take,
and now and then to see whether they would.

With drafts of K tokens for the samples for which more is expected of it than of what was looked up, a step gives
B + S tokens, S the sum of all survivals, and takes T(rows) + K times what the model takes for a token, and a share of
what it has to catch up with before. Survival is expected by what was learned of acceptance, for such confidences as
its drafts had before. Whatever is spent on it, the margin of the last and next steps must cover, rows and what it
has to catch up with included, as if no draft token was accepted.

What does not pay is tried in a share of the time, of one sample where of all is too much.

Shapes: B running samples, R of them that the model is asked for, K tokens of a draft, C confidences, G kinds of sample
(not greedy, greedy).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Self

import numpy as np
from numpy.typing import NDArray

from plait.kernels.draft_lookup import CELLS, DEPTHS, MODEL, NUM_CONFIDENCES
from plait.speculation.acceptance import Acceptance
from plait.speculation.choice import LEAST_GAIN, Room, nothing, share_of, weigh
from plait.speculation.drafter import Asked, CostlyDrafter, DraftTokens
from plait.speculation.ledger import Ledger
from plait.speculation.pool import FloatArray, IntArray
from plait.speculation.step_cost import StepCost, Typical

SHARE = 0.005
"""Share of the time that trials may take where drafts do not pay."""
THINKING = 0.0025
"""Share of the time that finding out whether they would may take then."""
SAVED_STEPS = 128
"""Steps whose share may be saved up for trials: of more the margin would not cover the price."""
BETWEEN = 32
"""Steps between trials."""
TRIED = 2
"""Tokens of a draft of a trial, and of the first drafts, at most."""
FIRST = 24
"""Tokens that it has drafted, up to which it is hardly known."""
SPREAD = 32
"""Steps over which it is spread what the model catches up with, or as many as a sample has tokens left."""
LAST = 0.1
"""Weight of the last drafts among those whose confidences are remembered."""


@dataclass(frozen=True)
class Wanted:
    """What the model is asked for."""

    rows_R: IntArray
    """Samples, as places among those that run."""
    depth: int
    """Tokens of a draft."""
    least: float
    """A draft ends where its survival falls below."""
    seconds: float
    """What that takes, as often as it is done again."""
    is_trial: bool = False


@dataclass(frozen=True)
class LookedUp:
    """What a step comes to with what was looked up alone."""

    tokens_B: FloatArray
    """Expected of the drafts that are computed."""
    lengths_B: IntArray
    gain: float
    """As of `Choice`."""
    cost: StepCost
    num_context: int
    """Tokens that the samples of the step have before it."""
    spent_s: float
    """What looking up has taken."""

    @classmethod
    def of(cls, drafts: DraftTokens, cost: StepCost, num_context: int, spent_s: float) -> Self:
        """What is computed of drafts where there are no others."""
        num_samples = len(drafts.lengths_B)
        choice = nothing(num_samples)
        if drafts.num_tokens:
            seconds_M1 = cost.seconds(np.arange(num_samples, num_samples + drafts.num_tokens + 1), num_context)
            choice = weigh(drafts, seconds_M1, np.zeros(len(seconds_M1)), Room(inf)).best
        is_taken_BK = np.arange(drafts.survival_BK.shape[1]) < choice.lengths_B[:, None]
        tokens_B = (drafts.survival_BK * is_taken_BK).sum(1)
        return cls(tokens_B, choice.lengths_B, choice.gain, cost, num_context, spent_s)

    def seconds(self, num_rows_X: IntArray) -> FloatArray:
        """[X], of steps of so many rows."""
        return self.cost.seconds(num_rows_X, self.num_context)

    @property
    def plain_s(self) -> float:
        """Seconds of a step without drafts."""
        return float(self.seconds(np.array([len(self.lengths_B)]))[0])


class Costly:
    """A drafter whose seconds count, and what is known of how it does.

    Args:
        most: tokens of a draft.
        acceptance: what is learned of all drafts.
        ledger: what steps take, and what all may lose.
    """

    def __init__(self, drafter: CostlyDrafter, most: int, acceptance: Acceptance, ledger: Ledger) -> None:
        self.drafter = drafter
        self._most, self._acceptance, self._ledger = most, acceptance, ledger
        self.shares_GKC = np.full((2, most, NUM_CONFIDENCES), 1.0 / NUM_CONFIDENCES)
        """How often its drafts had each confidence."""
        self.thinking = Typical()
        """Seconds of finding out whether drafts pay."""
        self._allowance_s, self._allowed_at_s = 0.0, 0.0
        """What trials may take, as it was after so many seconds of steps."""
        self._thought_at, self._tried_at = 0.0, 0.0
        """Steps until then."""
        self.num_drafted = 0
        """Tokens."""
        self.pays = False
        """Whether drafts were expected to gain when that was asked last."""

    def expected(self, asked: Asked) -> FloatArray:
        """[B, K]: chances that a draft is accepted up to each of its tokens; 0 behind what the samples may still
        say."""
        places_K = np.arange(self._most)
        chances_GDC = self._acceptance.table_C.reshape(CELLS)[:, MODEL, 0]
        chances_GKC = chances_GDC[:, np.searchsorted(DEPTHS, places_K, side="right")]
        survival_GK = (self.shares_GKC * chances_GKC).sum(-1).cumprod(-1)
        most = TRIED if self.num_drafted < FIRST else self._most
        return survival_GK[asked.greedy_B.astype(int)] * (places_K < np.minimum(asked.limits_B, most)[:, None])

    def is_due(self, plain_s: float) -> bool:
        """Whether it is worth the time to find out whether drafts pay.

        Args:
            plain_s: of a step without drafts.
        """
        thinking_s = self.thinking.seconds
        since = self._ledger.counts.steps - self._thought_at
        if not self.pays and since * THINKING * self._ledger.step.seconds < thinking_s:
            return False
        return bool(thinking_s <= self._ledger.margin.room_s(plain_s))

    def steps_to_wait(self) -> int:
        """Steps after which it may be worth the time again to find out whether drafts pay."""
        step_s = self._ledger.step.seconds
        return 1 if self.pays or step_s == 0 else max(1, ceil(self.thinking.seconds / (THINKING * step_s)))

    def wanted(self, asked: Asked, looked_up: LookedUp, *, may_pay: bool) -> Wanted | None:
        """What it should draft; None: nothing.

        Args:
            may_pay: False: no draft is computed in this step, so that only a trial is of use.
        """
        expected_BK = self.expected(asked)
        rows_R = (expected_BK.sum(1) > looked_up.tokens_B).nonzero()[0]
        best = self._that_pays(asked, rows_R, expected_BK, looked_up) if may_pay and len(rows_R) else None
        if may_pay:
            self.pays = best is not None and not best.is_trial
        return self._trial(asked, looked_up) if best is None else best

    def propose(self, asked: Asked, wanted: Wanted, looked_up: DraftTokens) -> DraftTokens:
        """What was looked up, and in its place what the model proposes where more of that is expected to be accepted,
        or where that is tried."""
        rows_R = wanted.rows_R
        drafts = self.drafter.propose(asked.part(rows_R), wanted.depth, self._acceptance.table_C, wanted.least)
        self._remember(asked.greedy_B[rows_R], drafts)
        self.num_drafted += drafts.num_tokens
        better_R = drafts.survival_BK.sum(1) > looked_up.survival_BK[rows_R].sum(1)
        taken_R = drafts.lengths_B > 0 if wanted.is_trial else better_R
        rows_R, width = rows_R[taken_R], drafts.token_ids_BK.shape[1]
        merged = DraftTokens(*(array.copy() for array in vars(looked_up).values()))
        for name in ("token_ids_BK", "cells_BK", "survival_BK"):
            array = getattr(merged, name)
            array[rows_R] = 0
            array[rows_R, :width] = getattr(drafts, name)[taken_R]
        merged.lengths_B[rows_R] = drafts.lengths_B[taken_R]
        return merged

    def took(self, wanted: Wanted | None, thinking_s: float, drafting_s: float) -> None:
        """What finding out and drafting took in this step."""
        self.thinking.took(thinking_s)
        self._thought_at = self._ledger.counts.steps
        if wanted is not None and wanted.is_trial:
            self._allowance_s = self._allowed_s() - drafting_s
            self._tried_at = self._thought_at

    def _allowed_s(self) -> float:
        """What trials may take by now."""
        now_s = self._ledger.seconds
        saved_s = self._allowance_s + SHARE * (now_s - self._allowed_at_s)
        self._allowance_s = min(saved_s, SHARE * SAVED_STEPS * self._ledger.step.seconds)
        self._allowed_at_s = now_s
        return self._allowance_s

    def _that_pays(self, asked: Asked, rows_R: IntArray, expected_BK: FloatArray, looked_up: LookedUp) -> Wanted | None:
        """The depth with the most tokens per second, if these are enough more than without. Where the margin does not
        cover that, of fewer samples."""
        num, is_asked_B = len(expected_BK), np.zeros(len(expected_BK), bool)
        is_asked_B[rows_R] = True
        catch_up_s, token_s = self.drafter.seconds_of(asked.slots_B[rows_R])
        again = int(np.clip(asked.limits_B[rows_R].mean(), 1, SPREAD))
        places_K, mine_RK = np.arange(1, self._most + 1), expected_BK[rows_R]
        rows_K = (mine_RK > 0).sum(0).cumsum()
        others_K = num + rows_K + looked_up.lengths_B[~is_asked_B].sum()
        tokens_K = num + mine_RK.sum(0).cumsum() + looked_up.tokens_B[~is_asked_B].sum()
        seconds_K = looked_up.seconds(others_K) + token_s * places_K + catch_up_s / again
        per_second_K = tokens_K / np.maximum(seconds_K, 1e-12)
        alone = num + np.array([int(looked_up.lengths_B.sum())])
        others = (num + looked_up.tokens_B.sum()) / max(float(looked_up.seconds(alone)[0]), 1e-12)
        if per_second_K.max() < LEAST_GAIN * others:
            return None
        plain_s = looked_up.plain_s
        prices_K = looked_up.cost.most(num + rows_K, looked_up.num_context) - plain_s + token_s * places_K
        room_s = self._ledger.margin.room_s(plain_s, once_s=catch_up_s + looked_up.spent_s)
        expected_K = looked_up.seconds(num + rows_K) - plain_s + token_s * places_K
        is_covered_K = (prices_K <= room_s) & (expected_K <= share_of(num) * room_s)
        allowed_K = np.where(is_covered_K, per_second_K, 0.0)
        best = int(allowed_K.argmax())
        if allowed_K[best] < LEAST_GAIN * others:
            fewer = len(rows_R) // 2
            return self._that_pays(asked, rows_R[:fewer], expected_BK, looked_up) if fewer else None
        least = 0.5 * min(1.0, float(per_second_K[best]) * token_s / len(rows_R))
        return Wanted(rows_R, best + 1, least, token_s * (best + 1))

    def _trial(self, asked: Asked, looked_up: LookedUp) -> Wanted | None:
        """A trial with all samples, or with the first or the last, which have least to catch up with: they were drafted
        for before, or have said least."""
        allowed_s = self._allowed_s()
        if self._ledger.counts.steps - self._tried_at < BETWEEN or allowed_s <= 0:
            return None
        all_rows = np.arange(len(asked.slots_B))
        for rows_R in (all_rows, all_rows[:1], all_rows[-1:]):
            catch_up_s, token_s = self.drafter.seconds_of(asked.slots_B[rows_R])
            prices_K = catch_up_s + looked_up.spent_s + token_s * np.arange(1, TRIED + 1)
            covered_K = prices_K <= min(allowed_s, self._ledger.margin.room_s(looked_up.plain_s))
            if covered_K.any():
                return Wanted(rows_R, int(covered_K.nonzero()[0][-1]) + 1, 0.0, 0.0, is_trial=True)
        return None

    def _remember(self, greedy_R: NDArray[np.bool_], drafts: DraftTokens) -> None:
        """Confidences of the drafts, which stand in their cells."""
        for greedy in (0, 1):
            lengths_R, cells_RK = drafts.lengths_B[greedy_R == greedy], drafts.cells_BK[greedy_R == greedy]
            for place in range(int(lengths_R.max(initial=0))):
                confidences = cells_RK[lengths_R > place, place] % NUM_CONFIDENCES
                shares_C = np.bincount(confidences, minlength=NUM_CONFIDENCES) / len(confidences)
                self.shares_GKC[greedy, place] += LAST * (shares_C - self.shares_GKC[greedy, place])

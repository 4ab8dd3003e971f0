"""What steps took, and what drafts gained and lost in them. Steps in which nobody looked for drafts are accounted for
later, many at once: at each of them it would take a percent of a short step."""

from __future__ import annotations

from dataclasses import dataclass

from plait.speculation.counts import Counts
from plait.speculation.margin import Margin
from plait.speculation.promise import MAY_LOSE, WINDOW
from plait.speculation.step_cost import StepCost, Typical

SELDOM = 32
"""Steps after which drafts are looked up in any case; and steps with drafts after which one is without, so that what
those take is known: the first in which they would gain little. Where a draft model proposes that is not asked."""
LATEST = 48
"""Steps with drafts, a draft model's among them, after which the next is without, whatever they would gain."""
REST = 64
"""Steps without drafts where WINDOW steps with drafts have lost what may be lost. Who gains a twentieth has fewer
tokens per second than without in many such windows, by chance."""
COLD = 8
"""Steps behind prompts, one after another, after which they are measures all the same: there are hardly others."""


@dataclass(slots=True)
class Spent:
    """Seconds of a step, beside its rows; grows."""

    before_s: float = 0.0
    """Seconds of accounting, before it began: the step's own are without."""
    looking_s: float = 0.0
    """Seconds of looking drafts up, and of choosing."""
    drafted_s: float = 0.0
    """Seconds of a draft model."""

    @property
    def seconds(self) -> float:
        return self.before_s + self.looking_s + self.drafted_s


@dataclass(frozen=True)
class Counted:
    """A step of nothing but running samples; see `Speculation.done`."""

    num_rows: int
    num_drafted: int
    num_context: int
    num_drawn: int
    seconds: float
    alone_s: float
    """What the forward and the drawing took of these."""

    @property
    def num_computed(self) -> int:
        """Rows, drafts included."""
        return self.num_rows + self.num_drafted


class Ledger:
    """What one engine's steps took, and what drafts gained in them. `may_lose` is that of the margin."""

    def __init__(self, may_lose: float = MAY_LOSE) -> None:
        self.cost, self.step, self.margin = StepCost(), Typical(), Margin(may_lose)
        self._paid = 1.0 - may_lose
        """Tokens per second of WINDOW steps with drafts, against what they would have been without, below which
        drafts rest."""
        self.seconds = 0.0
        """Seconds of all steps of nothing but running samples."""
        self._counts = Counts()
        self._quiet: list[tuple[int, int, float]] = []
        """Rows (0, if there were prompts), context, seconds of steps that are not accounted for."""
        self._is_behind_prompts, self._num_cold = False, 0
        """Whether the last step computed prompts; steps behind such ones since there was another."""
        self.since_plain, self.resting = 0, 0
        """Steps with drafts since the last one without; steps that drafts still rest."""
        self.window: list[tuple[float, float]] = []
        """Seconds that the last steps with drafts would have taken without, and took; fewer than WINDOW."""

    @property
    def counts(self) -> Counts:
        """What is counted of all steps so far."""
        self.account()
        return self._counts

    @property
    def is_cold(self) -> bool:
        """Whether the next step measures nothing: the first behind prompts finds caches cold."""
        return self._is_behind_prompts and self._num_cold < COLD

    @property
    def rests(self) -> bool:
        """Whether drafts have not paid and are not computed for a while."""
        return self.resting > 0

    @property
    def may_draft(self) -> bool:
        """Whether drafts may be computed in the next step: they do not rest, and it is not one that shows what steps
        without take."""
        return not self.rests and self.since_plain < LATEST

    @property
    def wants_plain(self) -> bool:
        """Whether one without drafts would be of use."""
        return self.since_plain >= SELDOM

    def plain_s(self, num_samples: int, num_context: int) -> float:
        """A step without drafts."""
        return self.cost.of(num_samples, num_context)

    def quiet(self, num_rows: int, num_context: int, seconds: float) -> None:
        """A step in which drafts were not looked for.

        Args:
            num_rows: samples; 0: it computed prompts as well.
        """
        self._quiet.append((num_rows, num_context, seconds))

    def account(self) -> None:
        """For the quiet steps so far."""
        for num_rows, num_context, seconds in self._quiet:
            self.margin.done(seconds, 0.0)
            if num_rows:
                self.since_plain, self.resting = 0, max(0, self.resting - 1)
                self._measured(num_rows, num_context, seconds)
                self._took(seconds)
            self._is_behind_prompts = num_rows == 0
        self._quiet.clear()

    def done(self, step: Counted, spent: Spent, *, is_paid: bool) -> None:
        """A step of nothing but running samples.

        Args:
            spent: on drafts, since the step before.
            is_paid: a draft model drafted so as to gain by it: the step counts even if no draft was computed.
        """
        self.account()
        counts = self._counts
        is_first = step.num_drafted > 0 and counts.steps_with_drafts == 0  # it loads kernels, and says little
        warm_s = self._warm_s(step)
        if not is_first:
            self._measured(step.num_computed, step.num_context, step.alone_s)
        self._is_behind_prompts = False
        self._took(step.seconds)
        if step.num_drafted:
            self.since_plain += 1
            counts.steps_with_drafts += 1
            counts.rows += step.num_rows
            counts.drafted += step.num_drafted
        else:
            self.since_plain, self.resting = 0, max(0, self.resting - 1)
        lost_s = spent.seconds
        if step.num_drafted or is_paid:
            plain_s = self.plain_s(step.num_rows, step.num_context) * step.num_drawn / step.num_rows
            if not is_first:
                counts.saved_s += plain_s - warm_s
                self._weigh(plain_s, warm_s)
            lost_s = spent.before_s + warm_s - plain_s if step.num_drafted else lost_s
        else:
            counts.saved_s -= spent.drafted_s
        self.margin.done(step.seconds, lost_s)

    def mixed(self, num_rows: int, num_drafted: int, num_context: int, seconds: float, spent: Spent) -> None:
        """A step that computed prompts beside running samples; see `Speculation.mixed`."""
        self.account()
        more_s = 0.0
        if num_drafted:
            self._counts.rows += num_rows
            self._counts.drafted += num_drafted
            more_s = self.cost.of(num_rows + num_drafted, num_context) - self.cost.of(num_rows, num_context)
        self.margin.done(seconds, spent.seconds + more_s)
        self._is_behind_prompts = True

    def _warm_s(self, step: Counted) -> float:
        """What a step would have taken if it were not the first behind prompts: without drafts it was as cold."""
        if not self.is_cold:
            return step.seconds
        return step.seconds + min(0.0, self.cost.of(step.num_computed, step.num_context) - step.alone_s)

    def _measured(self, num_computed: int, num_context: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        is_cold = self.is_cold
        self._num_cold = self._num_cold + 1 if self._is_behind_prompts else 0
        if not is_cold:
            self.cost.observe(num_computed, num_context, seconds)

    def _took(self, seconds: float) -> None:
        self._counts.steps += 1
        self.step.took(seconds)
        self.seconds += seconds

    def _weigh(self, plain_s: float, seconds: float) -> None:
        """A step with drafts took so long, and without would have: drafts rest where they do not pay."""
        self.window.append((plain_s, seconds))
        if len(self.window) == WINDOW:
            plain, taken = (sum(column) for column in zip(*self.window, strict=True))
            self.resting = REST if plain < self._paid * taken else 0
            self.window.clear()

"""When drafts are due: in each step while they gain more than looking for them takes; otherwise seldom, which is
enough to notice when they would."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from plait.speculation.ledger import SELDOM, Ledger
from plait.speculation.probes import PROBES
from plait.speculation.promise import WINDOW
from plait.speculation.step_cost import Typical

if TYPE_CHECKING:
    from plait.speculation.costly import Costly

OVERHEAD = 0.005
"""Share of the time that looking up may take while drafts do not pay."""
REFUSED = 4
"""Steps after which it is asked again whether looking up is covered, where it was not."""
DOUBTED = 256
"""Where it takes more than all that may be lost."""
EAGER, MOST_STEPS = 2, 4
"""Looks without a draft, one after another, after which a further one is a step later each time; and at most so many
steps. Who says something new mostly goes on with it."""


class Due:
    """Counts the steps of one engine, and says in which of them drafts are looked for.

    Args:
        ledger: what the steps took, gained and lost.
        costly: the draft model; None: there is none.
        is_adaptive: False: drafts are looked up in every step.
    """

    def __init__(self, ledger: Ledger, costly: Costly | None, *, is_adaptive: bool) -> None:
        self._ledger, self._costly, self._is_adaptive = ledger, costly, is_adaptive
        self.looking = Typical()
        """Seconds of looking up in a step."""
        self.gain = 0.0
        """What drafts gain in the mean, as a share of a step."""
        self.least_price_s = 0.0
        """Seconds that one draft token costs."""
        self.learns = False
        """Whether drafts that were found would show what rows take, and might pay."""
        self.overlaps = False
        """Whether several steps were ever under way at once, as where stages pass steps on."""
        self._stakes: deque[float] = deque()
        """What each step under way may lose."""
        self._is_counted = False
        """Whether drafts might be due in the newest step."""
        self._begun = 0
        """Steps that have begun."""
        self._at, self._pool_at = 0, 0
        """The steps in which drafts are due again: of any kind, and those that are looked up."""
        self._seldom_at = 0
        """The step in which drafts are looked up whether any may be computed or not."""
        self._heard_at, self._in_vain = 0, 0
        """The last step in which drafts were due, and the last looks of which no draft was computed."""

    def begin(self) -> bool:
        """A step begins. Returns whether drafts might be due in it."""
        self.passes()
        self.overlaps |= len(self._stakes) > 1
        self._is_counted = self.overlaps or self._begun >= self._at
        return self._is_counted

    def passes(self) -> None:
        """A step begins without asking, as `is_quiet`; what its samples have said is heard later."""
        self._begun += 1
        self._stakes.append(0.0)

    @property
    def is_quiet(self) -> bool:
        """Whether drafts are due neither in the next step nor in one under way. Then the next step need not ask, and
        may begin before those under way have ended (`passes`)."""
        return not self.overlaps and not self._is_counted and self._begun + 1 < self._at

    def end(self, num_drafted: int) -> bool:
        """The oldest step under way has ended. Returns whether it had nothing to do with drafts."""
        if self._stakes:
            self._stakes.popleft()
        is_counted, self._is_counted = self._is_counted, self.overlaps
        return not is_counted and num_drafted == 0

    def heard(self) -> int:
        """Samples are heard now. Returns for how many steps they were not, this one included."""
        num_steps, self._heard_at = self._begun - self._heard_at, self._begun
        return num_steps

    @property
    def staked_s(self) -> float:
        """What the steps under way may lose."""
        return sum(self._stakes)

    def stake(self, seconds: float) -> None:
        """What the newest step may lose."""
        if self._stakes:
            self._stakes[-1] = seconds

    def gained(self, share: float) -> None:
        """What drafts gain in a step, as a share of it; in the mean the last steps count most."""
        self.gain = share if self.gain == 0.0 else 0.95 * self.gain + 0.05 * share

    def settle(self, *, looked: bool, is_open: bool) -> None:
        """A step is accounted for. When drafts are due again: at once where they gain more than looking takes.

        Args:
            looked: whether drafts were looked up in it.
            is_open: whether some were computed, of which nothing was heard yet.
        """
        looking_s, step_s = self.looking.seconds, self._ledger.step.seconds
        if looked:
            pays = self.gain * step_s > looking_s and not self._ledger.rests
            is_new = not self._is_adaptive or self._ledger.cost.num_steps < PROBES or self.learns
            seldom = int(min(max(looking_s / max(OVERHEAD * step_s, 1e-12), 1), SELDOM))
            self._in_vain = 0 if is_open else self._in_vain + 1
            steps = 1 if is_new else min(max(self._in_vain - EAGER, 1), MOST_STEPS)
            self._seldom_at = self._begun + max(seldom, steps)
            self._pool_at = self._begun + steps if pays or is_new else self._seldom_at
        least = SELDOM if self._costly is None else self._costly.steps_to_wait()
        self._at = min(self._pool_at, self._begun + (1 if is_open else least))

    def of_pool(self, num_samples: int, num_context: int) -> bool:
        """Whether drafts are looked up in a step of so many samples and tokens held by them: it is time, and what that
        takes is covered."""
        if not self._is_adaptive:
            return True
        if self._begun < self._pool_at:
            return False
        looking_s, margin = self.looking.seconds, self._ledger.margin
        plain_s = self._ledger.plain_s(num_samples, num_context)
        # Before the seldom look it is of no use to look if nothing of what is found may be computed.
        price_s = 0.0 if self._begun >= self._seldom_at else self.least_price_s
        if looking_s + price_s <= margin.room_s(plain_s):
            return True
        if looking_s > margin.most_lost * WINDOW * plain_s:  # it never will be, unless that was a chance
            self.looking.doubt()
            self._pool_at = self._begun + DOUBTED
        else:
            self._pool_at = self._begun + REFUSED
        return False

    def of_model(self, num_samples: int, num_context: int) -> bool:
        """Whether it is considered in such a step to ask the draft model."""
        if self._costly is None:
            return False
        return not self._is_adaptive or self._costly.is_due(self._ledger.plain_s(num_samples, num_context))

"""Drafts only in steady steps, in which they cannot change a bit: a row has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plait.generation.decode_batch import NO_DRAFTS, Drafts
from plait.generation.response import Response
from plait.generation.speculates import Quiet, Speculates
from plait.policy.step import Key, StepPlan
from plait.speculation.acceptance import Learned
from plait.speculation.counts import Counts
from plait.speculation.knowledge import Knowledge


class WhereSteady:
    """Asks another `Speculates` in steady steps, and makes no drafts in others. The other one is made at the first
    steady step, or when there is something to tell it.

    Args:
        made: makes the other one.
        is_steady: whether the next step is steady (`Forward.is_steady`).
    """

    quiet: Quiet | None = None
    """See Speculates.quiet."""
    capturing_s = 0.0
    """See Speculates.capturing_s: no device that has steady steps captures any."""

    def __init__(self, made: Callable[[], Speculates], is_steady: Callable[[], bool]) -> None:
        self.made, self._is_steady = made, is_steady
        self.own: Speculates | None = None
        """The other one; None: it is not made yet."""
        self._is_asked = False
        """Whether it was asked for the drafts of the last step."""

    def make(self) -> Speculates:
        """The drafter `own`, made at the first call."""
        if self.own is None:
            self.own = self.made()
        return self.own

    @property
    def counts(self) -> Counts | None:
        """See Speculates.counts; None: it is not made."""
        return None if self.own is None else self.own.counts

    def prepare(self) -> None:
        """See Speculates.prepare."""
        if self.own is None and self._is_steady():
            self.make()

    def drafts(self, started: Mapping[Key, Response], running: Sequence[Key]) -> Drafts:
        """See Speculates.drafts."""
        self._is_asked = self.own is not None and self._is_steady()
        return self.own.drafts(started, running) if self.own is not None and self._is_asked else NO_DRAFTS

    def done(self, plan: StepPlan, num_drawn: int, seconds: float) -> None:
        """See Speculates.done."""
        if self.own is not None and self._is_asked:
            self.own.done(plan, num_drawn, seconds)

    def rest(self) -> None:
        """See Speculates.rest."""
        if self.own is not None:
            self.own.rest()

    def new_policy(self) -> None:
        """See Speculates.new_policy."""
        if self.own is not None:
            self.own.new_policy()

    def recall(self, prompt_ids: tuple[int, ...], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """See Speculates.recall."""
        self.make().recall(prompt_ids, token_ids, logprobs)

    def learned(self) -> Learned | None:
        """See Speculates.learned."""
        return None if self.own is None else self.own.learned()

    def learn(self, learned: Learned) -> None:
        """See Speculates.learn."""
        self.make().learn(learned)

    def knowledge(self) -> Knowledge | None:
        """See Speculates.knowledge."""
        return None if self.own is None else self.own.knowledge()

    def take_up(self, knowledge: Knowledge) -> None:
        """See Speculates.take_up."""
        self.make().take_up(knowledge)

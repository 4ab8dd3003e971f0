"""The protocol of what makes drafts for an engine, and the one that makes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from plait.generation.decode_batch import NO_DRAFTS, Drafts
from plait.generation.response import Response
from plait.policy.step import Key, StepPlan
from plait.speculation.acceptance import Learned
from plait.speculation.counts import Counts
from plait.speculation.knowledge import Knowledge


class Quiet(Protocol):
    """Between steps with drafts: what samples have drawn need not be known before a step without."""

    @property
    def is_quiet(self) -> bool:
        """Whether there are no drafts for the next step, whatever is drawn in those that are in flight."""
        ...

    def passes(self) -> None:
        """The next step is launched without asking for drafts, as `is_quiet`."""
        ...


class Speculates(Protocol):
    """Makes the drafts of an engine's steps. Of several ranks of an instance one does (`Joint.drafts`)."""

    quiet: Quiet | None
    """Says before a step whether it makes drafts for it; None: it does not know."""

    def prepare(self) -> None:
        """Before a step, outside of its measured seconds: make what drafts need, if it is missing."""
        ...

    def drafts(self, started: Mapping[Key, Response], running: Sequence[Key]) -> Drafts:
        """Drafts of the next tokens of running samples.

        Args:
            started: all samples in flight.
            running: those in the batch.
        """
        ...

    def done(self, plan: StepPlan, num_drawn: int, seconds: float) -> None:
        """Learn from a step that was computed.

        Args:
            num_drawn: tokens that samples got in it.
            seconds: that it took, `drafts` included.
        """
        ...

    def rest(self) -> None:
        """No sample is in flight any more."""
        ...

    def new_policy(self) -> None:
        """The weights have changed."""
        ...

    def recall(self, prompt_ids: tuple[int, ...], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take up the text of a sample that was drawn earlier, with its log-probs."""
        ...

    def learned(self) -> Learned | None:
        """How often draft tokens are accepted, for an engine that samples move to; None: not known."""
        ...

    def learn(self, learned: Learned) -> None:
        """Take up what another engine has learned, as samples have come from it."""
        ...

    def knowledge(self) -> Knowledge | None:
        """What was learned about drafts, for the engine of a resumed run; None: nothing that would be of use."""
        ...

    def take_up(self, knowledge: Knowledge) -> None:
        """Take up what the engine of an earlier stay has learned, before anything else is learned."""
        ...

    @property
    def counts(self) -> Counts | None:
        """Counts of drafts since the engine was made; None: it makes none."""
        ...

    @property
    def capturing_s(self) -> float:
        """See CostlyDrafter.capturing_s."""
        ...


class _Always:
    """See Quiet."""

    is_quiet = True

    def passes(self) -> None:
        """See Quiet.passes."""


class NoSpeculation:
    """Makes no drafts: every step computes one token of each sample. See `Speculates`."""

    counts = None
    capturing_s = 0.0
    quiet: Quiet | None = _Always()

    def prepare(self) -> None:
        """See Speculates.prepare."""

    def drafts(self, started: Mapping[Key, Response], running: Sequence[Key]) -> Drafts:
        """See Speculates.drafts."""
        return NO_DRAFTS

    def done(self, plan: StepPlan, num_drawn: int, seconds: float) -> None:
        """See Speculates.done."""

    def rest(self) -> None:
        """See Speculates.rest."""

    def new_policy(self) -> None:
        """See Speculates.new_policy."""

    def recall(self, prompt_ids: tuple[int, ...], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """See Speculates.recall."""

    def learned(self) -> Learned | None:
        """See Speculates.learned."""
        return None

    def learn(self, learned: Learned) -> None:
        """See Speculates.learn."""

    def knowledge(self) -> Knowledge | None:
        """See Speculates.knowledge."""
        return None

    def take_up(self, knowledge: Knowledge) -> None:
        """See Speculates.take_up."""

"""What an engine asks for drafts, and who makes none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from plait.generation.response import Response
from plait.generation.rows import NO_DRAFTS, Drafts
from plait.policy.step import Key, StepPlan
from plait.speculation.acceptance import Learned
from plait.speculation.counts import Counts
from plait.speculation.knowledge import Knowledge


class Speculates(Protocol):
    """What an engine asks for drafts. Ranks of an instance must be told the same ones."""

    def prepare(self) -> None:
        """Before a step, whose seconds it does not count to: what is needed for guesses, if it is not there."""
        ...

    def drafts(self, started: Mapping[Key, Response], running: Sequence[Key]) -> Drafts:
        """Guesses of what these samples draw next.

        Args:
            started: all samples in flight.
            running: those in the batch.
        """
        ...

    def done(self, plan: StepPlan, num_drawn: int, seconds: float) -> None:
        """A step was computed, and took so long, `drafts` included."""
        ...

    def rest(self) -> None:
        """No sample is in flight any more."""
        ...

    def new_policy(self) -> None:
        """The weights have changed."""
        ...

    def recall(self, prompt_ids: tuple[int, ...], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """A sample of a prompt was drawn earlier, with these log-probs."""
        ...

    def learned(self) -> Learned | None:
        """What is known of how often guesses come true; None: nothing is."""
        ...

    def learn(self, learned: Learned) -> None:
        """Know that, too: samples have come from an engine that knows it."""
        ...

    def knowledge(self) -> Knowledge | None:
        """What has been learned of guesses, for an engine after this one; None: nothing that would be of use to it."""
        ...

    def take_up(self, knowledge: Knowledge) -> None:
        """Know what an engine before this one has learned; nothing is learned yet."""
        ...

    @property
    def counts(self) -> Counts | None:
        """How drafts went since the engine was made; None: it makes none."""
        ...


class NoSpeculation:
    """Every step computes one token of each sample; see `Speculates`."""

    counts = None

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

"""What the engine says of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from plait.policy.step import StepKind, StepPlan
from plait.schedule.work import Done


@dataclass(frozen=True)
class StepRecord:
    """What a step did, for a timeline and a cost model."""

    kind: StepKind
    num_sequences: int
    """Samples and prompts of which tokens were computed."""
    num_tokens: int
    """Tokens that went through the model."""
    num_context_tokens: int
    """Tokens held before it by the sequences that it computed."""
    num_finished: int
    """Samples that ended in it."""
    num_prefill_tokens: int
    """How many of `num_tokens` are of prompts, and of samples that are computed again."""
    num_drawn: int
    """Tokens that samples got."""
    num_preempted: int
    packing_s: float = 0.0
    """Seconds of it that went into packing the weights (and once into proving a faster backend): when work begins,
    whatever the step computes."""
    waited_s: float = 0.0
    """Seconds of it in which this rank waited for other ranks of the instance."""
    num_groups: int = 1
    """Steps in flight while it was computed, itself among them."""

    @classmethod
    def of(cls, plan: StepPlan, num_finished: int, num_drawn: int) -> StepRecord:
        """The record of a step that was planned, with what was drawn and ended meanwhile."""
        return cls(
            plan.kind,
            plan.num_sequences,
            plan.num_tokens,
            plan.num_context_tokens,
            num_finished,
            plan.num_chunk_tokens,
            num_drawn,
            len(plan.preempted),
        )

    def done(self, call: str, num_bytes: int, *, units: int) -> Done:
        """The step as an action of a call.

        Args:
            num_bytes: that came from other ranks in it.
            units: samples that were finished meanwhile, here or elsewhere.
        """
        name = self.kind.name
        return Done(f"{call}/{name.lower()}", name, self.num_tokens, num_bytes, units=units)

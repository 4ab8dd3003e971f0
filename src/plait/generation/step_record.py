"""What the engine says of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from plait.data.records import Sample
from plait.generation.flight import Drawn
from plait.policy.step import StepKind, StepPlan
from plait.schedule.work import Done


@dataclass
class Landed:
    """The results of landed steps, until `Engine.step` returns them."""

    finished: list[Sample] = field(default_factory=list)
    num_drawn: int = 0
    num_accepted: int = 0

    def add(self, drawn: Drawn, finished: Sequence[Sample]) -> None:
        """What samples drew, and those that ended with it."""
        self.finished += finished
        self.num_drawn += drawn.num_tokens
        self.num_accepted += drawn.num_accepted


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
    num_running: int = 0
    """Samples in the batch, those included that another step in flight computes."""
    num_accepted: int = 0
    """Drafts among the tokens that samples got."""
    packing_s: float = 0.0
    """Seconds of it that went into packing the weights (and once into proving a faster backend): when work begins,
    whatever the step computes."""
    waited_s: float = 0.0
    """Seconds of it in which this rank waited for other ranks of the instance."""
    num_groups: int = 1
    """Steps in flight while it was computed, itself among them."""

    @classmethod
    def of(cls, plan: StepPlan, num_running: int, num_groups: int, packing_s: float) -> StepRecord:
        """The record of a step that was launched."""
        return cls(
            plan.kind,
            plan.num_sequences,
            plan.num_tokens,
            plan.num_context_tokens,
            num_finished=0,
            num_prefill_tokens=plan.num_chunk_tokens,
            num_drawn=0,
            num_preempted=len(plan.preempted),
            num_running=num_running,
            packing_s=packing_s,
            num_groups=num_groups,
        )

    def ended(self, landed: Landed, waited_s: float) -> StepRecord:
        """With what was drawn and ended meanwhile, and the seconds that this rank waited."""
        return replace(
            self,
            num_finished=len(landed.finished),
            num_drawn=landed.num_drawn,
            num_accepted=landed.num_accepted,
            waited_s=waited_s,
        )

    def done(self, call: str, num_bytes: int, *, units: int) -> Done:
        """The step as an action of a call.

        Args:
            num_bytes: that came from other ranks in it.
            units: samples that were finished meanwhile, here or elsewhere.
        """
        name, decodes = self.kind.name, self.kind is StepKind.DECODE
        return Done(
            f"{call}/{name.lower()}",
            name,
            self.num_tokens,
            num_bytes,
            samples=self.num_running if decodes else 0,
            drawn=self.num_sequences + self.num_accepted if decodes else 0,
            units=units,
        )

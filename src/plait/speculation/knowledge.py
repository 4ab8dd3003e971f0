"""What an engine has learned about drafts, in a form that outlasts the engine: how often they are accepted, which holds
wherever the policy is the same, and what steps take, which holds where they were measured.

No token depends on it: an engine without it says the same, and learns it in some dozens of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from plait.kernels.draft_lookup import CELLS, NUM_CONFIDENCES
from plait.settings import Settings
from plait.speculation.costly import FIRST
from plait.speculation.counts import MOST_PLACES
from plait.speculation.ledger import LATEST, REST
from plait.speculation.probes import PROBED
from plait.speculation.promise import WINDOW
from plait.speculation.speculation import Speculation
from plait.speculation.step_cost import LAST, MANY, MOST_BUCKETS, Step

Seconds = Annotated[float, Field(ge=0)]
Times = Annotated[tuple[Seconds, ...], Field(max_length=LAST)]
"""The last ones, the newest last."""
_SHARES = (2, MOST_PLACES, NUM_CONFIDENCES)


class Pace(Settings):
    """What an engine's steps took, and what drafts gained and lost in the last of them."""

    buckets: tuple[tuple[Step, ...], ...] = Field(max_length=MOST_BUCKETS)
    """See `StepCost.buckets`."""
    num_steps: int = Field(ge=0)
    """Up to MANY: more make no difference."""
    step_s: Times
    looking_s: Times
    thinking_s: Times
    """Seconds of finding out whether a draft model pays."""
    probes: tuple[tuple[int, int, int], ...]
    """Bits of the number of running samples, place in PROBED, trials."""
    margin: tuple[tuple[Seconds, float], ...] = Field(min_length=WINDOW - 1, max_length=WINDOW - 1)
    """See `Margin.steps_W2`."""
    window: tuple[tuple[Seconds, Seconds], ...] = Field(max_length=WINDOW - 1)
    """See `Ledger`, as the next two."""
    since_plain: int = Field(ge=0, le=LATEST)
    """Up to LATEST, as `num_steps`: steps that measure, and such as were under way already, follow even then."""
    resting: int = Field(ge=0, le=REST)
    gain: float = Field(ge=0)
    """See `Speculation`."""

    @field_validator("buckets")
    @classmethod
    def _are_steps(cls, buckets: Sequence[Sequence[Step]]) -> Sequence[Sequence[Step]]:
        for bucket in buckets:
            if not 1 <= len(bucket) <= LAST:
                raise ValueError(f"expected 1 to {LAST} steps in a bucket, found {len(bucket)}")
            if not all(rows >= 1 and context >= 0 and seconds > 0 for rows, context, seconds in bucket):
                raise ValueError("expected steps of at least one row, no less than no context, and seconds above 0")
        return buckets

    @field_validator("probes")
    @classmethod
    def _are_probes(cls, probes: Sequence[tuple[int, int, int]]) -> Sequence[tuple[int, int, int]]:
        if not all(bits >= 1 and 0 <= number < len(PROBED) and trials >= 0 for bits, number, trials in probes):
            raise ValueError(f"expected bits above 0, a place below {len(PROBED)} and trials")
        return probes


class Knowledge(Settings):
    """What an engine knows of drafts.

    Shapes: C cells of acceptance that have trials, G kinds of sample (not greedy, greedy), K positions in a draft,
    N confidences.
    """

    cells: tuple[Annotated[int, Field(ge=0, lt=int(np.prod(CELLS)))], ...]
    """[C], of `draft_lookup.CELLS`, flat; rising."""
    trials: tuple[float, ...]
    """[C]."""
    hits: tuple[float, ...]
    """[C]: of the trials those that were accepted."""
    model_confidences: tuple[tuple[tuple[Seconds, ...], ...], ...] | None
    """[G, K, N]: how often drafts of the draft model had each; None: there is none."""
    num_drafted: int = Field(ge=0)
    """Tokens that the draft model drafted, up to FIRST: more make no difference."""
    model_pays: bool
    """Whether it was expected to gain when that was asked last."""
    pace: Pace | None
    """None: it was measured elsewhere, and holds no longer."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not len(self.cells) == len(self.trials) == len(self.hits):
            raise ValueError(f"found {len(self.cells)} cells, {len(self.trials)} trials and {len(self.hits)} hits")
        if any(later <= before for before, later in zip(self.cells, self.cells[1:], strict=False)):
            raise ValueError("expected cells that rise")
        if not all(0 <= hits <= trials for hits, trials in zip(self.hits, self.trials, strict=True)):
            raise ValueError("expected hits from 0 to as many as there were trials")
        confidences = self.model_confidences
        if confidences is not None and [len(confidences), *{len(of) for of in confidences}] != [*_SHARES[:2]]:
            raise ValueError(f"expected confidences of the draft model for {_SHARES[0]} kinds and {_SHARES[1]} places")
        if confidences is not None and {len(shares) for of in confidences for shares in of} != {_SHARES[2]}:
            raise ValueError(f"expected {_SHARES[2]} confidences of the draft model")
        return self

    @property
    def elsewhere(self) -> Self:
        """What of it holds on another machine, too."""
        return self.model_copy(update={"pace": None})


class Circumstances(Settings):
    """What the seconds of an engine's steps depend on."""

    machine: str
    device: str
    ranks: int
    """All of the run: those of a machine share its memory."""
    threads: int
    dtype: str
    exact: bool
    model: str
    draft_model: str | None
    tp: int
    pp: int

    def differs(self, now: Circumstances) -> str:
        """What is otherwise now, in words; nothing: all is as it was."""
        for name in type(self).model_fields:
            if (before := getattr(self, name)) != (other := getattr(now, name)):
                return f"`{name}` was {before} and is {other}"
        return ""


class Known(Settings):
    """What an instance of a role had learned."""

    role: str
    instance: int
    """Its place among those of the role."""
    circumstances: Circumstances
    knowledge: Knowledge


def knowledge_of(speculation: Speculation) -> Knowledge:
    """What `adaptive` speculation has learned. What it still has to conclude from that it concludes first, so that who
    goes on and who takes it up decide alike.

    Raises:
        ValidationError: something of it is not what it should be, such as seconds that a clock made negative.
    """
    acceptance, costly = speculation.acceptance, speculation.costly
    acceptance.settle()
    trials_C, hits_C = acceptance.learned
    cells = trials_C.nonzero()[0]
    return Knowledge(
        cells=tuple(cells.tolist()),
        trials=tuple(trials_C[cells].tolist()),
        hits=tuple(hits_C[cells].tolist()),
        model_confidences=None if costly is None else tuple(tuple(map(tuple, of)) for of in costly.shares_GKC.tolist()),
        num_drafted=0 if costly is None else min(costly.num_drafted, FIRST),
        model_pays=costly is not None and costly.pays,
        pace=_pace_of(speculation),
    )


def _pace_of(speculation: Speculation) -> Pace:
    ledger, costly = speculation.ledger, speculation.costly
    ledger.account()
    ledger.cost.settle()
    return Pace(
        buckets=ledger.cost.buckets,
        num_steps=min(ledger.cost.num_steps, MANY),
        step_s=ledger.step.last,
        looking_s=speculation.due.looking.last,
        thinking_s=() if costly is None else costly.thinking.last,
        probes=tuple((*key, trials) for key, trials in speculation.probes.trials.items()),
        margin=tuple(map(tuple, ledger.margin.steps_W2.tolist())),
        window=tuple(ledger.window),
        since_plain=min(ledger.since_plain, LATEST),
        resting=ledger.resting,
        gain=speculation.due.gain,
    )


def take_up(speculation: Speculation, knowledge: Knowledge) -> None:
    """Let `adaptive` speculation that has learned nothing yet know what another has learned."""
    trials_C, hits_C = (np.zeros(int(np.prod(CELLS))) for _ in range(2))
    cells = list(knowledge.cells)
    trials_C[cells], hits_C[cells] = knowledge.trials, knowledge.hits
    speculation.acceptance.take((trials_C, hits_C))
    costly, pace = speculation.costly, knowledge.pace
    if costly is not None and knowledge.model_confidences is not None:
        costly.shares_GKC[:] = knowledge.model_confidences
        costly.num_drafted, costly.pays = knowledge.num_drafted, knowledge.model_pays
    if pace is None:
        return
    ledger = speculation.ledger
    ledger.cost.recall(pace.buckets, pace.num_steps)
    ledger.step.recall(pace.step_s)
    ledger.margin.recall(np.array(pace.margin))
    ledger.window[:] = pace.window
    ledger.since_plain, ledger.resting = pace.since_plain, pace.resting
    speculation.due.looking.recall(pace.looking_s)
    speculation.probes.trials |= {(bits, number): trials for bits, number, trials in pace.probes}
    speculation.due.gain = pace.gain
    if costly is not None:
        costly.thinking.recall(pace.thinking_s)

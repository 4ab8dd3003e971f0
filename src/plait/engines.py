"""What the main loop asks of what computes: an engine that generates, one that scores and trains.

`workers` fills them for any number of ranks; the group of both is `runtime.workers`. Another engine stands beside
plait's own by keeping to these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from plait.data.records import Sample
from plait.data.rows import NO_VALUES, FloatArray, Rows
from plait.dataflow import CallKind, Column, Node, Score
from plait.generation.request import Request
from plait.policy.migration import AT_ONCE, Bounds, HowToMove
from plait.policy.step import Key
from plait.schedule.work import Done, Work
from plait.speculation.counts import Counts


@dataclass(frozen=True)
class Traits:
    """What a generation engine is, in the whole of a run."""

    num_instances: int
    """That generate side by side."""
    keeps_weights: bool
    """It draws from weights of its own, which are those that were published last (`update_weights`) also while the role
    is trained."""
    shares_devices: bool
    """Other calls may compute on its ranks while it generates: nothing leaves the devices in between."""
    tells_lengths: bool = True
    """`said` names unfinished samples."""


class InstanceMoves(Protocol):
    """Has unfinished samples of an engine go on in other instances of it: one move at a time."""

    gathers: bool
    """Whether the end of a rollout may be gathered in few instances, and models score where none is left."""
    moved_s: float | None
    """Seconds in which the samples that moved last stood still; None: they have not left, or none moved."""

    @property
    def unfinished(self) -> tuple[tuple[Key, ...], ...]:
        """Unfinished samples of each instance, in the order in which they were asked for."""
        ...

    @property
    def is_moving(self) -> bool:
        """Whether samples are on their way to other instances."""
        ...

    def gathering(self, bounds: Bounds) -> Mapping[tuple[int, int], Sequence[Key]]:
        """What would have to `move` so that all unfinished samples go on in as few instances as take them, each within
        its bounds whatever they still say; nothing, where that is no fewer."""
        ...

    def move(self, pairs: Mapping[tuple[int, int], Sequence[Key]], how: HowToMove = AT_ONCE) -> int:
        """Have samples go on in other instances: (source, target) → those that move. Left out are those that are not in
        the source; all, while others are on their way. How many move."""
        ...


class GenerationEngine(Protocol):
    """Draws responses to prompts, a step at a time; samples come in the order in which they are finished."""

    policy_version: int
    """Stamped on the tokens that are drawn."""
    traits: Traits
    model: Any
    """What this process has of the model; None: nothing."""

    @property
    def moves(self) -> InstanceMoves | None:
        """None: samples end in the instance in which they began."""
        ...

    @property
    def not_compiled(self) -> str | None:
        """Why the compiled forward is not used, in words; None: it is, or the engine has no such thing."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a request has samples that have not been given out."""
        ...

    @property
    def ready(self) -> bool:
        """Whether `advance` would do something at once."""
        ...

    @property
    def running(self) -> tuple[int, ...]:
        """Unfinished samples of each instance."""
        ...

    @property
    def said(self) -> Mapping[Key, int]:
        """Tokens that unfinished samples have at least; nothing is known of those that are not named."""
        ...

    @property
    def at_work(self) -> frozenset[int]:
        """Ranks of the instances that have samples in flight, or are about to."""
        ...

    def add(self, request: Request) -> None:
        """Ask for samples of a prompt; they join those in flight."""
        ...

    def advance(self, call: str) -> tuple[Done, list[Sample]]:
        """One step for all samples in flight: the record of it as an action of a call, and the samples that it
        finished."""
        ...

    def halt(self, *, parks: bool) -> None:
        """Have all samples stop as they are: they are given out by the next steps, unfinished (FinishReason.OPEN), but
        for those of which nothing had been begun. What is asked for later with `Request.going_on` goes on.

        Args:
            parks: the engine keeps what it has computed of them.
        """
        ...

    def update_weights(self, version: int) -> None:
        """The role's weights have changed; nothing is in flight. Later samples are stamped with `version`."""
        ...


class GroupEngine(GenerationEngine, Protocol):
    """What the group of all ranks asks of it beside."""

    @property
    def speculation(self) -> Counts | None:
        """How guesses went since the engine was made, as far as is known here; None: it makes none."""
        ...

    def give_up(self) -> None:
        """Nobody waits for the samples any longer: they are forgotten."""
        ...


@dataclass(frozen=True)
class Training:
    """What a TRAIN call of the flow asks for."""

    node: Node
    rows: Rows
    step: int
    temperature: float | None
    """That log-probs are taken at; None: the sampling temperature."""
    batch_values: Mapping[Column, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredBy:
    """Who scores rows alone: an instance of the scoring layout, of `TrainingEngine.scoring_instances`."""

    instance: int
    is_behind: bool = False
    """Its rank is busy with what it was told before, and begins when that has ended."""


class TrainingEngine(Protocol):
    """Scores rows and trains on them: log-probs, values and scores in float64, a work of micro-batches each."""

    role: str

    @property
    def scoring_instances(self) -> tuple[frozenset[int], ...]:
        """Ranks of each copy of the model that scores, where it has its weights without being brought them; else
        none."""
        ...

    @property
    def tokens_of_a_part(self) -> int:
        """That keep the devices that score busy: a call of fewer wastes their time."""
        ...

    def mesh(self, kind: CallKind, *, begins: bool) -> frozenset[int]:
        """The ranks that a call of this kind keeps busy; to begin, with those that bring it weights."""
        ...

    def syncing_weights(self, kind: CallKind) -> Work[None]:
        """Bring the role's weights to where a call of this kind computes."""
        ...

    def score(
        self,
        rows: Rows,
        what: Score,
        *,
        temperature: float | None = None,
        call: str | None = None,
        by: ScoredBy | None = None,
    ) -> Work[FloatArray]:
        """Log-probs in nats or values, [rows.num_tokens], or scores, [len(rows)].

        Args:
            temperature: that log-probs are taken at; None: that of the sampling.
            by: who computes all of it; None: all instances that score do, each a share.
        """
        ...

    @property
    def trains_with(self) -> tuple[str, ...]:
        """Roles that train together by one schedule, this one among them."""
        ...

    def train(self, training: Training) -> Work[dict[str, float]]:
        """Train as a TRAIN node of the flow says; metrics."""
        ...

    def train_together(self, trainings: Sequence[Training]) -> Work[list[dict[str, float]]]:
        """Train these roles together, of `trains_with`, in the order of the flow; the metrics of each."""
        ...

    def evaluate(
        self,
        node: Node,
        rows: Rows,
        *,
        temperature: float | None,
        batch_values: Mapping[Column, FloatArray] = NO_VALUES,
    ) -> Work[dict[str, float]]:
        """The loss of a TRAIN node over rows, without training; metrics."""
        ...

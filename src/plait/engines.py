"""The protocols of engines: one that generates, one that scores and trains. The main loop knows engines only by these.

`workers` implements both for any number of ranks; `runtime.workers` is the protocol of the whole group. Another engine
(vLLM) takes the place of plait's own by implementing them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from plait.data.records import Sample
from plait.data.rows import FloatArray, Rows
from plait.dataflow import Asked, CallKind, Column, Node
from plait.generation.refused import Refusals
from plait.generation.request import Request
from plait.policy.migration import AT_ONCE, Bounds, HowToMove
from plait.policy.step import Key
from plait.schedule.work import Done, Work
from plait.speculation.counts import Counts


@dataclass(frozen=True)
class Traits:
    """Properties of a generation engine that do not change during a run."""

    num_instances: int
    """Copies of the model that generate side by side."""
    keeps_weights: bool
    """Whether it has its own copy of the weights, those that were published last (`update_weights`), also while the
    role is trained."""
    shares_devices: bool
    """Whether other calls may compute on its ranks while it generates, as nothing has to leave the devices."""
    tells_lengths: bool = True
    """Whether `said` has the lengths of unfinished samples."""


class InstanceMoves(Protocol):
    """Moves unfinished samples between the instances of an engine, one move at a time."""

    gathers: bool
    """Whether the last samples of a rollout may be gathered in few instances, so that models score on the others."""
    moved_s: float | None
    """How long the samples of the last move paused, in seconds; None: they have not left yet, or none moved."""

    @property
    def unfinished(self) -> tuple[tuple[Key, ...], ...]:
        """Unfinished samples of each instance, in the order in which they were asked for."""
        ...

    @property
    def is_moving(self) -> bool:
        """Whether samples are on their way to other instances."""
        ...

    def gathering(self, bounds: Bounds, kept: int = 1) -> Mapping[tuple[int, int], Sequence[Key]]:
        """The move that gathers all unfinished samples in so many instances, or in as few more as hold them, however
        long they become: (source, target) → samples. Empty if that frees no instance."""
        ...

    def move(self, pairs: Mapping[tuple[int, int], Sequence[Key]], how: HowToMove = AT_ONCE) -> int:
        """Move samples: (source, target) → those that move. Samples that are not in the source are left out; all are,
        while another move is under way. Returns how many move."""
        ...


class GenerationEngine(Protocol):
    """Draws responses to prompts, a step at a time, and delivers samples in the order in which they end."""

    traits: Traits
    model: Any
    """What this process has of the model; None: nothing."""

    @property
    def moves(self) -> InstanceMoves | None:
        """Moves samples between instances; None: they end in the instance in which they began."""
        ...

    @property
    def refusals(self) -> Refusals:
        """What it does not do; those of stages are known when they have drawn samples."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a request has samples that have not been delivered."""
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
        """Unfinished samples → tokens that they have at least. Nothing is known of samples that are not there."""
        ...

    @property
    def at_work(self) -> frozenset[int]:
        """Ranks of the instances that have samples in flight, or are about to have some."""
        ...

    def add(self, request: Request) -> None:
        """Ask for samples of a prompt; they join those in flight."""
        ...

    def advance(self, call: str) -> tuple[Done | None, list[Sample]]:
        """Do one step for all samples in flight. Returns its record, as an action of the call (None: it could only
        wait), and the samples that ended in it."""
        ...

    def halt(self, *, parks: bool) -> None:
        """Stop all samples as they are. The next steps deliver those that have begun, unfinished (FinishReason.OPEN); a
        request with `Request.going_on` continues them later.

        Args:
            parks: whether the engine keeps their keys and values.
        """
        ...

    def end_turns(self) -> None:
        """Samples that have ended do not go on (`Request.in_turns`): let go of what is held for them."""
        ...

    def update_weights(self, version: int) -> None:
        """Take the role's new weights, while nothing is in flight. Later samples are stamped with `version`."""
        ...


class GroupEngine(GenerationEngine, Protocol):
    """A generation engine as the group of all ranks uses it."""

    @property
    def speculation(self) -> Counts | None:
        """Counts of drafts since the engine was made, as far as this rank knows them; None: it makes none."""
        ...

    def give_up(self) -> None:
        """Forget all samples: nobody waits for them any longer."""
        ...


@dataclass(frozen=True)
class LossOver:
    """Rows, and the loss of a TRAIN node over them: what is trained on, or evaluated."""

    node: Node
    rows: Rows
    temperature: float | None = None
    """The temperature that log-probs are taken at; None: the sampling temperature."""
    batch_values: Mapping[Column, FloatArray] = field(default_factory=dict)
    """Values for the whole batch that the loss reads."""

    @property
    def role(self) -> str:
        return str(self.node.role)


@dataclass(frozen=True)
class ScoredBy:
    """One copy of a model that scores rows by itself."""

    instance: int
    """Its place in `TrainingEngine.scoring_instances`."""
    is_behind: bool = False
    """Whether its rank is still busy with another call, and begins when that has ended."""


class TrainingEngine(Protocol):
    """Scores rows and trains on them, one micro-batch per action; what it scores is float64."""

    role: str

    @property
    def scoring_instances(self) -> tuple[frozenset[int], ...]:
        """The ranks of each copy of the model that scores; empty if weights must be moved there first."""
        ...

    def tokens_of_a_part(self, root_tokens: int) -> int:
        """Tokens of a part that keep all devices that score busy, behind a root that each forward computes once.
        Smaller parts waste their time."""
        ...

    def mesh(self, kind: CallKind, *, begins: bool) -> frozenset[int]:
        """The ranks that a call of this kind keeps busy. With `begins` the ranks that send it weights are included."""
        ...

    def syncing_weights(self, kind: CallKind) -> Work[None]:
        """Bring the role's weights to where a call of this kind computes."""
        ...

    def score(
        self,
        rows: Rows,
        what: Asked,
        *,
        temperature: float | None = None,
        call: str | None = None,
        by: ScoredBy | None = None,
    ) -> Work[FloatArray]:
        """Log-probs in nats or values, [rows.num_tokens], `Top`, [rows.num_tokens, its width], or scores, [len(rows)].

        Args:
            temperature: that log-probs are taken at; None: the sampling temperature.
            call: name of the call, for its actions; None: the role's and the output's.
            by: the copy that computes all of it; None: all copies do, each a share.
        """
        ...

    @property
    def trains_with(self) -> tuple[str, ...]:
        """Roles that train together by one schedule, this one included."""
        ...

    def train(self, overs: Sequence[LossOver], *, step: int) -> Work[list[dict[str, float]]]:
        """Train as TRAIN nodes of the flow say, in its order: of this role one, or those whose gradients meet in the
        same optimizer steps; of several roles of `trains_with` all that train together. The result is the metrics of
        each node.

        Args:
            step: of the run, from 0.
        """
        ...

    def evaluate(self, over: LossOver) -> Work[dict[str, float]]:
        """The loss over the rows, without training; the result is its metrics."""
        ...

"""What a prediction asks of a cost model: seconds and bytes of calls, moves and copies, each a sum of named terms.

Seconds are floats, bytes whole numbers. A layout is a mesh with dp, tp, pp and the layers of its stages. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from plait.cost.cluster import ClusterSpec
from plait.cost.connections import Connections
from plait.cost.generation_memory import EngineBytes
from plait.layout.mesh import Layout
from plait.schedule.plan import Mode

PROMPTS = "prompts"
"""The term of a generation's prompts."""

Amount = int | NDArray[np.float64]
"""Bytes: of one device, or of each of several."""


@dataclass(frozen=True)
class Spread:
    """The layouts of all instances of a generation, which share its prompts.

    prompts: of instances that compute prompts for others; none: each that draws computes those of its samples
    samples: of those that draw
    """

    prompts: tuple[Layout, ...]
    samples: tuple[Layout, ...]

    def first_of(self, layout: Layout) -> int:
        """Instances of its side in front of those of a layout."""
        side = self.prompts if layout in self.prompts else self.samples
        return num_instances(side[: side.index(layout)])


def num_instances(layouts: Sequence[Layout]) -> int:
    return sum(layout.parallelism.dp for layout in layouts)


@dataclass(frozen=True)
class Tail:
    """One way in which a generation may end.

    end_s:  its seconds
    idle_s: instance seconds until then in which instances have no samples left
    move_s: in which samples stand still that are gathered on fewer instances; 0: none are
    """

    end_s: float
    idle_s: float
    move_s: float = 0.0

    def times(self, factor: float) -> Tail:
        return Tail(factor * self.end_s, factor * self.idle_s, factor * self.move_s)


class LateTails(Sequence[Tail]):
    """Ways in which a generation may end that are worked out when the first is asked for: a search prices many
    generations that no plan has."""

    def __init__(self, found: Callable[[], tuple[Tail, ...]]) -> None:
        self._found = cache(found)

    def __len__(self) -> int:
        return len(self._found())

    @overload
    def __getitem__(self, place: int) -> Tail: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Tail]: ...
    def __getitem__(self, place: int | slice) -> Tail | Sequence[Tail]:
        return self._found()[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._found() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._found())


@dataclass(frozen=True)
class CallCost:
    """
    seconds:          from its start on free devices to its end on all of them
    terms:            what they are made of; they sum to `seconds`
    bytes:            that its devices exchange in it, each counted where it is received
    working_bytes:    of a device of each pipeline stage, beside weights and optimizer state: activations, the head's
                      chunk, keys and values
    instance_seconds: of generation, the end of each instance (dp), in their order; else empty
    tails:            of generation by several instances, the ways in which it may end; `seconds` is of the first
    first_s:          of generation, when its first prompts have all their samples
    in_parts_s:       more than `seconds`, where samples are scored in parts by ranks that have none left to generate
    activation_bytes: of `working_bytes`, what forwards keep; plain_bytes: of a family whose layers are not fused, these
    widened_bytes:    of generation, more than `working_bytes` where packed weights are widened
    passing_bytes:    of `working_bytes`, what no pool that stays keeps
    set_bytes:        of each device, what its share of the samples was drawn from; all_set_bytes: of a generation, of
                      all samples that are there at a time, where the flow runs
    """

    seconds: float
    terms: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0
    working_bytes: tuple[int, ...] = (0,)
    instance_seconds: tuple[float, ...] = ()
    tails: Sequence[Tail] = ()
    first_s: float = 0.0
    in_parts_s: float = 0.0
    activation_bytes: tuple[int, ...] = (0,)
    plain_bytes: tuple[int, ...] = (0,)
    widened_bytes: tuple[int, ...] = (0,)
    passing_bytes: tuple[int, ...] = (0,)
    set_bytes: int = 0
    all_set_bytes: int = 0

    def times(self, factor: float, *, but: Collection[str] = ()) -> CallCost:
        """Taking so many times as long; bytes stay.

        Args:
            but: terms that stay as they are. What has no terms of its own takes so many times as long as all of it.
        """
        terms = {name: seconds * (1.0 if name in but else factor) for name, seconds in self.terms.items()}
        if but and self.seconds > 0:
            factor = sum(terms.values()) / self.seconds
        by_instance = tuple(factor * seconds for seconds in self.instance_seconds)
        tails = tuple(tail.times(factor) for tail in self.tails)
        return replace(
            self,
            seconds=factor * self.seconds,
            terms=terms,
            instance_seconds=by_instance,
            tails=tails,
            first_s=factor * self.first_s,
            in_parts_s=factor * self.in_parts_s,
        )


@dataclass(frozen=True)
class MoveCost:
    """
    seconds: until every device is done
    terms:   what they are made of; they sum to `seconds`
    bytes:   that all devices together receive
    """

    seconds: float
    terms: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0

    def times(self, factor: float) -> MoveCost:
        """Taking so many times as long."""
        terms = {name: factor * seconds for name, seconds in self.terms.items()}
        return replace(self, seconds=factor * self.seconds, terms=terms)


class Costs(Protocol):
    """What simulated steps and searches ask. Pure and deterministic; answers are kept, so that a search may ask again
    and again."""

    @property
    def cluster(self) -> ClusterSpec: ...

    @property
    def process_terms(self) -> Mapping[str, int]:
        """Bytes that a process holds beside models and calls, by term; of NCCL's connections those of the group of all
        ranks alone."""
        ...

    @property
    def connections(self) -> Connections | None:
        """Memory of the NCCL connections that depend on the plan; None: there are none to count."""
        ...

    @property
    def keeps_freed(self) -> bool:
        """Whether what activations took stays with a process that generates next."""
        ...

    @property
    def engine_bytes(self) -> Mapping[str, EngineBytes]:
        """Role → what its engine takes on a rank where it generates, beside the models of roles: all the time, and what
        may come to it."""
        ...

    def slack(
        self, *, activations: Amount, plain: Amount, weights: Amount, working: Amount, moves: bool, widened: Amount
    ) -> Mapping[str, Amount]:
        """What ranks may hold on top of what is expected; see `working_memory.slack_terms`.

        Args:
            activations: of the largest micro-batch; plain: of a family whose layers are not fused.
            weights: of the largest model.
            working: what the fullest moment of a step takes beyond that in which all models have been read.
            moves: whether weights are moved, or leave devices.
            widened: what the fullest moment grows by if packed weights are widened.
        """
        ...

    def call(
        self,
        call: str,
        mode: Mode,
        layout: Layout,
        *,
        micro_batch_tokens: int | None = None,
        schedule: str = "",
        spread: Spread | None = None,
    ) -> CallCost:
        """One call of the flow in one step.

        Args:
            call: as the flow names it (`actor.generate`).
            mode: `decode` stands for all of a generation, its prompts included; `prefill` for the prompts alone.
            micro_batch_tokens: of a forward; None: the workload's.
            schedule: of a training's pipeline; empty: 1F1B.
            spread: of a generation whose instances are in several layouts; the layout is one of these.
        """
        ...

    def working_bytes(
        self, call: str, mode: Mode, layout: Layout, *, micro_batch_tokens: int | None = None, schedule: str = ""
    ) -> tuple[int, ...]:
        """`CallCost.working_bytes` of `call` of a role that has a model, in a small part of the time; not of `prefill`,
        which goes with where samples are drawn."""
        ...

    def stage_seconds(self, call: str, layout: Layout, micro_batches: int) -> Sequence[tuple[float, float]]:
        """Forward and backward of each pipeline stage, of a mini-batch's share of one copy in so many micro-batches; a
        backward with the layers that are computed again."""
        ...

    @property
    def pool_takes_rest(self) -> bool:
        """Whether the keys and values of a generation have what nothing else on a device takes."""
        ...

    def generation(self, call: str, layout: Layout, spread: Spread, held_bytes: tuple[int, ...]) -> CallCost:
        """As `call` in `decode`, where the pool takes what is left.

        Args:
            spread: all that draw; none compute prompts alone.
            held_bytes: of each of its layouts, weights, these among them, and optimizer state on the device with most
                of them.
        """
        ...

    def move(self, role: str, source: Layout, target: Layout) -> MoveCost:
        """A role's weights from one layout to another."""
        ...

    def offload(self, role: str, layout: Layout, what: Literal["weights", "state"]) -> MoveCost:
        """Weights, or masters and moments, between devices and their hosts' memory, in one direction."""
        ...

    def held_bytes(self, role: str, layout: Layout, *, trained: bool) -> tuple[int, ...]:
        """Bytes of a device of each pipeline stage: weights, and of a trained role masters, moments and gradients; the
        most that any of the stage's devices holds.
        """
        ...

"""Where each slot of a step runs, with the seconds and the bytes by rank that a simulation needs, looked up once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from plait.cost.costs import CallCost, Costs, Spread, Tail
from plait.layout.mesh import Layout
from plait.schedule.pipeline import micro_batches_of
from plait.schedule.plan import After, Placement
from plait.schedule.training_order import is_by_rule
from plait.simulator.step_graph import StepGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

AFTERS: tuple[After, ...] = ("keep", "offload", "drop")
"""In the order of precedence; arrays hold indices into it."""
KEEP, OFFLOAD, DROP = range(3)
WHOLE = 0
"""Number of a part that is all of a model."""


@dataclass(frozen=True)
class PlacementCosts:
    """The costs of one placement by a cost model. Equal for placements on meshes of one shape.

    calls: of each call of the slot
    held:  by stage, bytes of weights; state: of masters, moments and gradients
    load_s, state_s: seconds in which weights and state go to host memory, or come back
    """

    calls: tuple[CallCost, ...]
    held: tuple[int, ...]
    state: tuple[int, ...]
    load_s: float
    state_s: float


class Place:
    """Where a slot runs.

    placements: of the slot's first call; several only of generation, those of instances that compute prompts alone last
    asked:      of each of them
    mask:       bit r: rank r computes
    costs:      of each call of the slot
    seconds:    of each call of the slot
    parts:      [ranks] which part of the model a rank has (equal numbers are one part), −1 where it has none
    weights:    [ranks] bytes
    state:      [ranks] bytes of masters, moments and gradients; None: it is not trained
    after:      [ranks] place in AFTERS
    working:    [ranks] bytes that a call takes beside
    activations: [ranks] of these, what forwards keep; plain: of a family whose layers are not fused; passing: of
                generation, what no pool that stays keeps
    widened:    [ranks] more than `working`, where packed weights are widened
    sets:       [ranks] what a rank's share of the samples was drawn from
    load_s:     seconds in which its weights come from host memory, or go there; state_s: the state
    chunks:     parts in which a streaming score is computed
    """

    def __init__(
        self,
        graph: StepGraph,
        slot: int,
        placements: tuple[Placement, ...],
        asked: Sequence[PlacementCosts],
        num_ranks: int,
        numbers: dict[object, int],
    ) -> None:
        self.slot, self.placements = slot, placements
        self.load_s = max(answer.load_s for answer in asked)
        self.state_s = max(answer.state_s for answer in asked)
        self.parts, self.after = np.full(num_ranks, -1), np.zeros(num_ranks, np.int64)
        self.weights = np.zeros(num_ranks)
        self.state = np.zeros(num_ranks) if any(asked[0].state) else None
        self.mask = 0
        for p, answer in zip(placements, asked, strict=True):
            self._fill(p, answer, numbers)
        self._answer(asked)
        first = placements[0]
        self.chunks = graph.rollouts.parts(first.dp * micro_batches_of(first.pp), first.micro_batch_tokens)

    def _fill(self, p: Placement, asked: PlacementCosts, numbers: dict[object, int]) -> None:
        size, first, whole = len(p.ranks), p.ranks[0], _whole(p)
        at = _at(p)
        self.mask |= ((1 << size) - 1) << first if whole else sum(1 << rank for rank in p.ranks)
        stages = _stages(size, p.tp, p.pp)
        self.parts[at] = _part_numbers(p, whole, numbers)
        self.after[at] = AFTERS.index(p.after)
        self.weights[at] = np.array(asked.held, float)[stages]
        if self.state is not None:
            self.state[at] = np.array(asked.state, float)[stages]

    def _answer(self, asked: Sequence[PlacementCosts]) -> None:
        """Set what calls take, from the costs of each placement."""
        self.asked = tuple(asked)
        drawing = zip(*(answer.calls for answer in self.asked[: self.num_drawing]), strict=True)
        self.costs = tuple(max(of_call, key=lambda cost: cost.seconds) for of_call in drawing)
        self.seconds = tuple(cost.seconds for cost in self.costs)
        amounts = np.zeros((6, len(self.weights)))
        self.working, self.activations, self.plain, self.widened, self.passing, self.sets = amounts
        for p, answer in zip(self.placements, asked, strict=True):
            sets = 0 if p.mode == "prefill" else max(cost.set_bytes for cost in answer.calls)
            of_stages = [
                most_of_calls([cost.working_bytes for cost in answer.calls], p.pp),
                most_of_calls([cost.activation_bytes for cost in answer.calls], p.pp),
                most_of_calls([cost.plain_bytes for cost in answer.calls], p.pp),
                most_of_calls([cost.widened_bytes for cost in answer.calls], p.pp),
                most_of_calls([cost.passing_bytes for cost in answer.calls], p.pp),
                (sets,) * p.pp,
            ]
            amounts[:, _at(p)] = np.array(of_stages, float)[:, _stages(len(p.ranks), p.tp, p.pp)]

    def tails(self, number: int) -> Sequence[Tail]:
        """The ways in which a generation may end; the first is without gathering. It is not predicted of instances of
        different size, nor where prompts are computed elsewhere: there is only the first way.

        Args:
            number: of the call, among those of the slot.
        """
        tails = self.costs[number].tails
        return tails if self.num_drawing == 1 and not self.is_apart else tails[:1]

    @property
    def num_drawing(self) -> int:
        """Placements without those of instances that compute prompts alone."""
        return sum(p.mode != "prefill" for p in self.placements)

    @property
    def is_apart(self) -> bool:
        """Whether it generates, and prompts are computed on instances of their own."""
        return self.num_drawing < len(self.placements)

    @property
    def num_instances(self) -> int:
        """Copies of the model that compute, of a generation those that draw."""
        return sum(p.dp for p in self.placements[: self.num_drawing])

    @property
    def has_shares(self) -> bool:
        """Whether its ranks share weights, and lie in no other part."""
        return self.placements[0].shards_weights

    @cached_property
    def leaves(self) -> bool:
        """Whether its memory does not stay, as far as it is asked."""
        return bool(self.after.any())

    @cached_property
    def draws(self) -> Bools:
        """[ranks] which of them compute, without those that compute prompts alone."""
        draws = np.zeros(len(self.parts), bool)
        for p in self.placements[: self.num_drawing]:
            draws[_at(p)] = True
        return draws

    def with_calls(self, calls: Sequence[tuple[CallCost, ...]]) -> Place:
        """The same place with other costs of its calls.

        Args:
            calls: of each placement, each call of the slot.
        """
        other = copy(self)
        other._answer([replace(answer, calls=mine) for answer, mine in zip(self.asked, calls, strict=True)])
        return other

    @cached_property
    def ways(self) -> Floats:
        """[ranks] of a training, the share of its pipeline's filling and draining that a micro-batch needs to the stage
        of a rank and back: 0 at the first, 1 at the last. Stages of a plan are cut to take about as long."""
        ways = np.zeros(len(self.parts))
        p = self.placements[0]
        ways[_at(p)] = _stages(len(p.ranks), p.tp, p.pp) / max(1, p.pp - 1)
        return ways

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(p.layout for p in self.placements)


class Places:
    """Makes places, each once.

    Args:
        num_ranks: of the plan.
    """

    def __init__(self, graph: StepGraph, costs: Costs, num_ranks: int) -> None:
        self.graph, self.costs, self.num_ranks = graph, costs, num_ranks
        self._numbers: dict[object, int] = {}
        self._made: dict[Hashable, Place] = {}

    def place(self, slot: int, placements: Sequence[Placement], asked: Sequence[PlacementCosts] | None = None) -> Place:
        """The place of a slot, from the placements of one of its calls.

        Args:
            asked: of each placement, where it is known.
        """
        key = (slot, tuple((p.ranks, p.dp, p.tp, p.pp, p.stages, *_manner(p)) for p in placements))
        if key not in self._made:
            if asked is None:
                spread = _spread(placements) if len(placements) > 1 else None
                asked = [self.ask(slot, p, spread) for p in placements]
            self._made[key] = Place(self.graph, slot, tuple(placements), asked, self.num_ranks, self._numbers)
        return self._made[key]

    def ask(self, slot: int, p: Placement, spread: Spread | None = None) -> PlacementCosts:
        """`spread` as of `Costs.call`."""
        role, mode, layout = self.graph.slots[slot].role, p.mode, p.layout
        calls = tuple(
            self.costs.call(
                self.graph.calls[number].call,
                mode,
                layout,
                micro_batch_tokens=p.micro_batch_tokens,
                schedule=p.schedule,
                spread=spread,
            )
            for number in self.graph.calls_of[slot]
        )
        trained = mode == "train"
        weight_bytes = self.costs.held_bytes(role, layout, trained=False)
        trained_bytes = self.costs.held_bytes(role, layout, trained=True) if trained else weight_bytes
        state_s = self.costs.offload(role, layout, "state").seconds if trained else 0.0
        state = tuple(num_bytes - other for num_bytes, other in zip(trained_bytes, weight_bytes, strict=True))
        return PlacementCosts(calls, weight_bytes, state, self.costs.offload(role, layout, "weights").seconds, state_s)


def ranks_of(mask: int) -> tuple[int, ...]:
    """The ranks whose bits are set, ascending."""
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)


def trained_together(graph: StepGraph, places: Sequence[Place]) -> list[tuple[int, ...]]:
    """For each schedule of the plan that trains several slots at the same time, these slots."""
    named: dict[str, list[int]] = {}
    for slot, place in enumerate(places):
        schedule = place.placements[0].schedule
        if graph.slots[slot].mode == "train" and not is_by_rule(schedule):
            named.setdefault(schedule, []).append(slot)
    return [tuple(slots) for slots in named.values() if len(slots) > 1]


def _spread(placements: Sequence[Placement]) -> Spread:
    """The instances of a generation."""
    prompts = tuple(p.layout for p in placements if p.mode == "prefill")
    return Spread(prompts, tuple(p.layout for p in placements if p.mode != "prefill"))


def _whole(p: Placement) -> bool:
    """Whether the ranks of a placement are consecutive."""
    size, first = len(p.ranks), p.ranks[0]
    return p.ranks[-1] - first == size - 1 and (size < 3 or p.ranks == tuple(range(first, first + size)))


def _at(p: Placement) -> slice | Ints:
    return slice(p.ranks[0], p.ranks[0] + len(p.ranks)) if _whole(p) else np.array(p.ranks)


def _manner(p: Placement) -> tuple[object, ...]:
    return p.after, p.micro_batch_tokens, p.schedule, p.shards_weights


def most_of_calls(of_calls: Sequence[tuple[int, ...]], stages: int) -> Sequence[int]:
    """By stage, bytes of the call with most; one number stands for all stages."""
    if len(of_calls) == 1 and len(of_calls[0]) == stages:
        return of_calls[0]
    return [max(of_stages[min(stage, len(of_stages) - 1)] for of_stages in of_calls) for stage in range(stages)]


@lru_cache(maxsize=4096)
def _stages(size: int, tp: int, pp: int) -> Ints:
    """Pipeline stage of each rank of a layout, in its order."""
    return np.arange(size) // tp % pp


MOST = 1 << 20
"""More than any rank."""


def _part_numbers(p: Placement, whole: bool, numbers: dict[object, int]) -> Ints | int:
    """A number for `schedule.placements.part_key` of each rank of a placement: equal keys have equal numbers."""
    size = p.tp * p.pp
    if p.shards_weights:
        return (1 + numbers.setdefault(("share", p.ranks, p.tp, p.pp, p.stages), len(numbers))) * MOST
    if size == 1:
        return WHOLE
    cut = 1 + numbers.setdefault((p.tp, p.pp, p.stages), len(numbers))
    if whole:
        return cut * MOST + np.repeat(np.arange(p.ranks[0], p.ranks[-1] + 1, size), size)
    of_ranks = []
    for start in range(0, len(p.ranks), size):
        ranks = p.ranks[start : start + size]
        if ranks == tuple(range(ranks[0], ranks[0] + size)):
            number = cut * MOST + ranks[0]
        else:
            number = (1 + numbers.setdefault((ranks, p.tp, p.pp, p.stages), len(numbers))) * MOST
        of_ranks += [number] * size
    return np.array(of_ranks)

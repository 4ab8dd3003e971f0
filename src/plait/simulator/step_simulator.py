"""Whole steps in simulated seconds, by the dispatcher of a run: calls, moves of weights, offloads and loads.

Calls overlap as in a run: calls on disjoint ranks whose needs have ended, and scoring in parts during generation. A
step begins when the one before has ended, as in a run.

The dispatcher treats ranks that the same calls use as one. So a step of six calls takes a fraction of a millisecond on
any number of devices.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from plait.cost.costs import Costs, Spread
from plait.layout.mesh import Layout
from plait.schedule.dispatch import Dispatcher
from plait.simulator.clock import SimulatedClock
from plait.simulator.places import Floats, Place
from plait.simulator.step_follows import followings
from plait.simulator.step_graph import NO_MODEL, StepGraph
from plait.simulator.step_memory import held_bytes
from plait.simulator.step_program import MOVE, Action, StepProgram
from plait.simulator.step_weights import Weights, kept_bytes, weights_of


@dataclass(frozen=True)
class Played:
    """The result of simulated steps.

    actions: of all steps
    ends_s:  end of each step
    places:  of each slot; those that generate, with the pool that they have room for
    """

    actions: tuple[Action, ...]
    ends_s: tuple[float, ...]
    places: tuple[Place, ...]

    @property
    def step_s(self) -> float:
        """Seconds of a step, once steps repeat themselves."""
        first, *_, last = (0.0, *self.ends_s) if len(self.ends_s) == 1 else self.ends_s
        return (last - first) / max(1, len(self.ends_s) - 1)


class StepSimulator:
    """Simulates steps of one flow. What it has computed about weights is kept from plan to plan.

    functions_s: call that reward functions answer → its seconds
    """

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        self._weights: dict[Hashable, Weights] = {}
        self._pools = _PoolRoom(graph, costs)
        self.functions_s = {
            call.call: costs.call(call.call, "score", Layout.on((0,))).seconds
            for call in graph.calls
            if call.slot == NO_MODEL
        }

    def weights(self, places: Sequence[Place]) -> tuple[Weights, ...]:
        """The weights of each family.

        Args:
            places: of each slot, in their order.
        """
        weights = []
        for family in self.graph.families:
            mine = tuple(places[slot] for slot in family)
            if mine not in self._weights:
                if len(self._weights) > 200_000:
                    self._weights.clear()
                self._weights[mine] = weights_of(self.graph, self.costs, mine)
            weights.append(self._weights[mine])
        return tuple(weights)

    def play(
        self, places: Sequence[Place], *, steps: int = 1, orders: Mapping[str, float] = MappingProxyType({})
    ) -> Played:
        """Simulate steps. Each begins as the one before leaves it: new weights are where they were trained.

        Args:
            places: of each slot, in their order.
            orders: see `joint_orders.shares_of`.
        """
        weights = self.weights(places)
        places = self._pools.fitted(places, weights)
        clock = SimulatedClock()
        program = StepProgram(self.graph, places, weights, clock, self.functions_s, orders)
        followed, ends = followings(self.graph, places, weights, self.costs), []
        for step in range(steps):
            numbers = [*program.order.calls()]
            if program.units:
                numbers.append(len(self.graph.calls))  # the end of the step: offload units leave
            Dispatcher(program, clock, here=None).run((step, number) for number in numbers)
            program.end_step()
            for one in followed:
                start_s = clock.now_s
                clock.elapse(one.seconds)
                end = len(self.graph.calls)
                program.actions.append(
                    Action(f"{one.role}.follow", MOVE, one.role, one.mask, start_s, clock.now_s, step, end, one.bytes)
                )
            ends.append(clock.now_s)
        return Played(tuple(program.actions), tuple(ends), places)

    def peak_bytes(self, places: Sequence[Place]) -> Floats:
        """[ranks] the most that each rank holds in a step.

        Args:
            places: of each slot, in their order.
        """
        weights = self.weights(places)
        return held_bytes(self.graph, self._pools.fitted(places, weights), weights, self.costs).peak


class _PoolRoom:
    """Fits generations of a plan whose pool takes what is left of a device into the memory that the weights and
    optimizer states of all roles there leave; each fit is computed once."""

    def __init__(self, graph: StepGraph, costs: Costs) -> None:
        self._graph, self._costs = graph, costs
        self._made: dict[tuple[Place, tuple[int, ...]], Place] = {}

    def fitted(self, places: Sequence[Place], weights: Sequence[Weights]) -> tuple[Place, ...]:
        """The places; those that generate run as many samples at a time as their devices have room for.

        Args:
            places: of each slot, in their order.
            weights: of each family.
        """
        if not self._costs.pool_takes_rest:
            return tuple(places)
        kept = kept_bytes(weights)
        present = {slot: held_bytes for of_family in weights for slot, held_bytes in of_family.present.items()}
        fitted = list(places)
        for slot, place in enumerate(places):
            if self._graph.slots[slot].mode == "decode":
                held_bytes = kept + present[slot]
                most = tuple(int(held_bytes[list(p.ranks)].max()) for p in place.placements)
                fitted[slot] = self._of(place, most)
        return tuple(fitted)

    def _of(self, place: Place, held_bytes: tuple[int, ...]) -> Place:
        """A place of a generation whose devices hold so many bytes, of each of its placements."""
        if (place, held_bytes) not in self._made:
            names = [self._graph.calls[number].call for number in self._graph.calls_of[place.slot]]
            spread = Spread((), place.layouts)
            self._made[place, held_bytes] = place.with_calls(
                [
                    tuple(self._costs.generation(name, layout, spread, held_bytes) for name in names)
                    for layout in place.layouts
                ]
            )
        return self._made[place, held_bytes]

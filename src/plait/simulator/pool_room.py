"""Generations whose pool takes what is left of a device, after the weights and optimizer states of all roles there."""

from __future__ import annotations

from collections.abc import Sequence

from plait.cost.costs import Costs, Spread
from plait.simulator.places import Place
from plait.simulator.step_graph import StepGraph
from plait.simulator.step_weights import Weights, kept_bytes


class PoolRoom:
    """Fits generations of a plan into the memory that its other places leave; each fit is computed once."""

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

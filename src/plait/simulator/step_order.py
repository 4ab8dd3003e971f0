"""In which order the calls of a step begin, what is computed together, and what a step draws ahead
(`max_staleness`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait.simulator.places import Place, trained_together
from plait.simulator.step_graph import NO_MODEL, StepGraph

if TYPE_CHECKING:
    from plait.simulator.step_weights import Copies


@dataclass(frozen=True)
class StepOrder:
    """copies: of weights that are moved from where their role trains"""

    graph: StepGraph
    places: Sequence[Place]
    copies: Sequence[Copies]

    def calls(self) -> list[int]:
        """The calls of a step. What is drawn for later steps comes last, as in a run (`schedule.open_steps`), but where
        weights are brought for it: that is done between steps."""
        calls = range(len(self.graph.calls))
        if not self.graph.ahead:
            return list(calls)
        apart = {number for number in self.graph.draws if self._keeps_weights(number)}
        return sorted(calls, key=lambda number: (number not in apart, number in self._of_later))

    def needs_ahead(self, number: int) -> Iterable[int]:
        """What a call waits for in a step whose own samples were drawn before it. Where what generates computes with
        the weights that are trained, these are trained when all is drawn."""
        call, draws = self.graph.calls[number], self.graph.draws
        if number in self._of_later:
            return call.needs & self._of_later
        needs = call.needs - self._of_later
        if call.slot != NO_MODEL and self.graph.slots[call.slot].mode == "train":
            mine = (draw for draw in draws if self._role(draw) == self._role(number))
            return needs | {draw for draw in mine if not self._keeps_weights(draw)}
        return needs

    @property
    def _of_later(self) -> frozenset[int]:
        """What a step does for a batch behind its own, and had done for its own before."""
        return self.graph.draws | self.graph.early

    def together(self) -> dict[int, tuple[int, ...]]:
        """Training call → all that one schedule of the plan computes with it, where there are others: the first of each
        role, then the second of each, while each has one."""
        groups: dict[int, tuple[int, ...]] = {}
        for slots in trained_together(self.graph, self.places):
            for group in zip(*(self.graph.calls_of[slot] for slot in slots), strict=False):
                groups |= dict.fromkeys(group, tuple(sorted(group)))
        return groups

    def _role(self, number: int) -> str:
        return self.graph.slots[self.graph.calls[number].slot].role

    def _keeps_weights(self, draw: int) -> bool:
        """Whether a generation has copies of its own, on ranks that do not train, which stay and which nobody else
        computes with (`OffloadPolicy.held_copies`)."""
        slot, role = self.graph.calls[draw].slot, self._role(draw)
        place, home = self.places[slot], self.places[self.graph.home_of(role)]
        if place.mask & home.mask or (place.after > 0).any():
            return False
        return any(copies.slots == {slot} and not copies.drops for copies in self.copies if copies.role == role)

"""The order in which the calls of a step begin, which calls train together, and what a step draws ahead
(`max_staleness`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
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
        """The calls of a step. Draws for later steps come last, as in a run (`schedule.open_steps`), except those that
        need weights to be moved: these are moved between steps."""
        calls = range(len(self.graph.calls))
        if not self.graph.ahead:
            return list(calls)
        apart = {number for number in self.graph.draws_ahead if self._keeps_weights(number)}
        return sorted(calls, key=lambda number: (number not in apart, number in self._of_later))

    def needs_ahead(self, number: int) -> Iterable[int]:
        """The calls that a call waits for in a step whose own samples were drawn in an earlier one. If generation uses
        the weights that are trained, training begins when all samples are drawn."""
        call, draws = self.graph.calls[number], self.graph.draws_ahead
        if number in self._of_later:
            return call.needs & self._of_later
        needs = call.needs - self._of_later
        if call.slot != NO_MODEL and self.graph.slots[call.slot].mode == "train":
            mine = (draw for draw in draws if self._role(draw) == self._role(number))
            return needs | {draw for draw in mine if not self._keeps_weights(draw)}
        return needs

    @property
    def _of_later(self) -> frozenset[int]:
        """Calls that a step does for a later batch, and that an earlier step did for its own."""
        return self.graph.draws_ahead | self.graph.early

    def together(self) -> dict[int, tuple[int, ...]]:
        """Training call that trains together with others → all of these calls: those of an update of their role
        (`StepGraph.updates`), and by a schedule of several roles those of the first update of each role, then of the
        second of each, while each has one."""
        groups = [update for updates in self.graph.updates for update in updates if len(update) > 1]
        for slots in trained_together(self.graph, self.places):
            of_roles = zip(*(self.graph.updates[slot] for slot in slots), strict=False)
            groups += [tuple(sorted(chain.from_iterable(group))) for group in of_roles]
        return {number: group for group in groups for number in group}

    def _role(self, number: int) -> str:
        return self.graph.slots[self.graph.calls[number].slot].role

    def _keeps_weights(self, draw: int) -> bool:
        """Whether a generation has copies of its own, on ranks that do not train, which stay there and which no other
        call computes with (`OffloadPolicy.held_copies`)."""
        slot, role = self.graph.calls[draw].slot, self._role(draw)
        place, home = self.places[slot], self.places[self.graph.home_of(role)]
        if place.mask & home.mask or (place.after > 0).any():
            return False
        return any(copies.slots == {slot} and not copies.drops for copies in self.copies if copies.role == role)

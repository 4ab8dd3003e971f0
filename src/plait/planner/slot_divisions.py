"""Generations whose prompts are computed on devices of their own: how the devices of one may be divided in two, where
that takes less time than to compute prompts where samples are drawn.

What such a generation takes is played sample by sample, which takes longer than all forms of a mesh. So a division is
only played if a bound says that it may be worth it: the samples alone on one side, the prompts alone on the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.cost.costs import PROMPTS
from plait.layout.mesh import Parallelism
from plait.planner.plan_problem import PlanProblem
from plait.planner.slot_forms import Form, SlotForms
from plait.schedule.plan import After, Placement
from plait.simulator.places import Place, PlacementCosts, Places

LEAST_GAIN = 0.03
"""The share of its seconds that a generation must gain by a division: no run on GPUs has shown what one comes to."""
MOST_PLAYED = 8
"""Divisions of a mesh that are played, the most promising by their bounds."""
MOST_IN_VAIN = 2
"""Divisions of a mesh, one after another, that gain too little: then no other of it is played."""
MOST_INSTANCES = 256
"""Instances that draw in all divisions that are played, of all meshes: each takes some 20 ms, and on many devices a
division has hundreds. What has more than are left is not played."""
MOST_KEPT = 3
"""Divisions of a mesh that may be proposed."""


@dataclass(frozen=True, eq=False)
class Division:
    """How a generation is computed on meshes of one shape whose last devices compute the prompts.

    draw:    devices that draw, the first ones
    drawing: their form; prompts: how those behind them are cut
    asked:   of both
    seconds: of all calls of the slot
    """

    draw: int
    drawing: Form
    prompts: Parallelism
    asked: tuple[PlacementCosts, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class _Tried:
    """bound_s: that the division takes at least"""

    bound_s: float
    draw: int
    drawing: Form
    prompts: Parallelism


class SlotDivisions:
    """Divisions of the slots of a problem, found when they are first asked for.

    Args:
        by_ends: first rank, and the one behind the last → the legal mesh that has all between.
    """

    def __init__(
        self,
        problem: PlanProblem,
        places: Places,
        forms: SlotForms,
        by_ends: Mapping[tuple[int, int], tuple[int, ...]],
    ) -> None:
        self._problem, self._places, self._forms, self._by_ends = problem, places, forms, by_ends
        self._graph = problem.graph
        self._known: dict[tuple[int, object], tuple[Division, ...]] = {}
        self._left = MOST_INSTANCES

    def of(self, slot: int, ranks: tuple[int, ...]) -> tuple[Division, ...]:
        """Those on a mesh that gain `LEAST_GAIN` over each of its forms, the fastest first; none where the slot
        generates nothing, or its prompts have to be computed where its samples are drawn.

        Prompts are never computed on rank 0: it leads the run, and answers nobody while it computes a step of prompts.
        """
        what = self._graph.slots[slot]
        may = what.mode == "decode" and self._problem.roles[what.role].prompts_apart
        if not may or self._problem.costs.pool_takes_rest or len(ranks) < 2:
            return ()
        key = slot, self._forms.shape(ranks)
        if key not in self._known:
            self._known[key] = self._found(slot, ranks)
        return self._known[key]

    def place(self, slot: int, ranks: tuple[int, ...], division: Division, after: After = "keep") -> Place:
        """A division on a mesh of its shape."""
        placements = self._placements(slot, ranks, division.draw, division.drawing.parallelism, division.prompts)
        return self._places.place(slot, [replace(p, after=after) for p in placements], division.asked)

    def played(self, slot: int, ranks: tuple[int, ...], draw: int, drawing: Parallelism, prompts: Parallelism) -> Place:
        """A generation whose first `draw` devices draw, and whose others compute prompts."""
        return self._places.place(slot, self._placements(slot, ranks, draw, drawing, prompts))

    def _found(self, slot: int, ranks: tuple[int, ...]) -> tuple[Division, ...]:
        together = self._forms.of(slot, ranks)
        if not together:
            return ()
        most_s, found, in_vain = together[0].seconds * (1 - LEAST_GAIN), list[Division](), 0
        tried = sorted(self._tried(slot, ranks, most_s), key=lambda one: one.bound_s)
        for one in tried[:MOST_PLAYED]:
            has_best = len(found) >= MOST_KEPT and one.bound_s >= found[MOST_KEPT - 1].seconds
            if has_best or in_vain >= MOST_IN_VAIN:
                break
            if one.drawing.parallelism.dp > self._left:
                continue
            self._left -= one.drawing.parallelism.dp
            place = self.played(slot, ranks, one.draw, one.drawing.parallelism, one.prompts)
            seconds, sides = sum(place.seconds), zip(place.placements, place.asked, strict=True)
            in_vain = in_vain + 1 if seconds >= most_s else 0
            if seconds < most_s and all(self._forms.has_room(asked, p.layout) for p, asked in sides):
                found.append(Division(one.draw, one.drawing, one.prompts, place.asked, seconds))
                found.sort(key=lambda division: division.seconds)
        return tuple(found[:MOST_KEPT])

    def _tried(self, slot: int, ranks: tuple[int, ...], most_s: float) -> list[_Tried]:
        """Divisions that may take less than so many seconds."""
        tried = []
        first, end = ranks[0], ranks[-1] + 1
        for cut in range(first + 1, end):
            drawing, prompts = self._by_ends.get((first, cut)), self._by_ends.get((cut, end))
            if drawing is None or prompts is None:
                continue
            for draws in self._forms.of(slot, drawing):
                for computes in self._forms.of(slot, prompts):
                    bound_s = self.bound_s(draws, computes)
                    if bound_s < most_s:
                        tried.append(_Tried(bound_s, cut - first, draws, computes.parallelism))
        return tried

    @staticmethod
    def bound_s(draws: Form, computes: Form) -> float:
        """Seconds of all calls if each side had its own part of the work alone, and nothing to wait for.

        Args:
            draws, computes: what each side would do with prompts and samples.
        """
        prompts_s = [[cost.terms.get(PROMPTS, 0.0) for cost in form.asked.calls] for form in (draws, computes)]
        draw_s = (cost.seconds - own_s for cost, own_s in zip(draws.asked.calls, prompts_s[0], strict=True))
        return sum(map(max, draw_s, prompts_s[1]))

    def _placements(
        self, slot: int, ranks: tuple[int, ...], draw: int, drawing: Parallelism, prompts: Parallelism
    ) -> tuple[Placement, Placement]:
        call = self._graph.calls[self._graph.calls_of[slot][0]].call
        sides = (("decode", ranks[:draw], drawing), ("prefill", ranks[draw:], prompts))
        one, other = (
            Placement(call, mode, own, sizes.dp, sizes.tp, sizes.pp, "keep", sizes.stages)  # type: ignore[arg-type]
            for mode, own, sizes in sides
        )
        return one, other

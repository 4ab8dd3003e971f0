"""Seconds that a step of a plan takes at least, in a fraction of the time of playing it: no call begins before what it
needs has ended, and a rank does one after the other what keeps it busy.

Moves of weights, and what leaves devices and comes back, are left out. Of what may go on beside something else the most
that may be is taken off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from plait.policy.early_scores import LAST_SHARE
from plait.schedule.training_order import is_by_rule
from plait.simulator.joint_orders import idle_s
from plait.simulator.places import Place
from plait.simulator.step_graph import NO_MODEL, StepGraph

ROUNDING = 1e-9
"""The share by which a bound is lower, so that sums in another order are not above what is played."""


class _Least(NamedTuple):
    """A call. begin_s, end_s: no earlier; own_s: from its begin to its end, or to it from the end of the generation
    whose samples it scores; busy_s: of the ranks of a mask, which do nothing else meanwhile"""

    begin_s: float
    end_s: float
    own_s: float
    busy_s: float
    mask: int
    needs: Collection[int]


class StepBound:
    """
    Args:
        functions_s: call that functions answer → its seconds.
    """

    def __init__(self, graph: StepGraph, functions_s: Mapping[str, float]) -> None:
        self._graph, self._functions_s = graph, functions_s
        self._seconds: dict[Place, list[tuple[float, float, float]]] = {}
        self._spare: dict[Place, float] = {}

    def __call__(self, places: Sequence[Place]) -> float:
        """
        Args:
            places: of each slot, in their order.
        """
        calls: list[_Least] = []
        for number in range(len(self._graph.calls)):
            calls.append(self._least(number, places, calls))
        behind_s = [0.0] * len(calls)
        for number in range(len(calls) - 1, -1, -1):
            after_s = calls[number].own_s + behind_s[number]
            for other in calls[number].needs:
                behind_s[other] = max(behind_s[other], after_s)
        least = max(call.end_s + after_s for call, after_s in zip(calls, behind_s, strict=True))
        rows = [(call.begin_s, call.busy_s, call.mask, after_s) for call, after_s in zip(calls, behind_s, strict=True)]
        rows.sort(reverse=True)
        for rank in dict.fromkeys(_ends(mask for _, _, mask, _ in rows if mask)):
            busy_s, later_s = 0.0, float("inf")
            for begin_s, mine_s, mask, after_s in rows:
                if mask & rank:
                    busy_s, later_s = busy_s + mine_s, min(later_s, after_s)
                    least = max(least, begin_s + busy_s + later_s)
        return least * (1 - ROUNDING)

    def _least(self, number: int, places: Sequence[Place], before: Sequence[_Least]) -> _Least:
        graph, call = self._graph, self._graph.calls[number]
        place = None if call.slot == NO_MODEL else places[call.slot]
        if place is None:
            own_s = busy_s = parts_s = self._functions_s[call.call]
            mask, chunks = 0, graph.rollouts.groups
        else:
            own_s, busy_s, parts_s = self._seconds_of(place)[graph.calls_of[call.slot].index(number)]
            mask, chunks = place.mask, place.chunks
        source, scored = None, frozenset[int]()
        if call.source is not None:
            source, scored = places[graph.calls[call.source].slot], graph.scores_of[call.source]
        if source is not None and graph.fuses and mask & source.mask and number in scored:
            own_s = busy_s = min(own_s, parts_s - min(self._spare_s(source), parts_s * (1 - LAST_SHARE)))
        if graph.ahead:
            return _Least(0.0, own_s, own_s, busy_s, mask, ())
        if source is None or mask & source.mask:
            begin_s = max((before[need].end_s for need in call.needs), default=0.0)
            return _Least(begin_s, begin_s + own_s, own_s, busy_s, mask, call.needs)
        assert call.source is not None
        # It scores samples as they end, on ranks that others may use meanwhile.
        begin_s = max((before[need].end_s for need in call.beside), default=before[call.source].begin_s)
        last_s = own_s / chunks
        end_s = max(begin_s + own_s, before[call.source].end_s + last_s)
        return _Least(begin_s, end_s, last_s, 0.0, 0, {*call.beside, call.source})

    def _seconds_of(self, place: Place) -> list[tuple[float, float, float]]:
        """Each call from its begin to its end; in which its ranks are busy; and all of it, if scored in parts."""
        known = self._seconds.get(place)
        if known is None:
            mode = self._graph.slots[place.slot].mode
            known = self._seconds[place] = []
            for number, (own_s, cost) in enumerate(zip(place.seconds, place.costs, strict=True)):
                if mode == "decode" and self._graph.fuses and (tails := place.tails(number)):
                    own_s += min(tail.end_s for tail in tails) - tails[0].end_s
                is_filled = mode == "train" and not is_by_rule(place.placements[0].schedule)
                filled_s = idle_s(cost) if is_filled else 0.0
                if self._graph.calls[self._graph.calls_of[place.slot][number]].with_next:
                    own_s, filled_s = own_s - idle_s(cost), 0.0  # the next call fills its pipeline, and drains it
                known.append((own_s, own_s - filled_s, own_s + cost.in_parts_s))
        return known

    def _spare_s(self, place: Place) -> float:
        """The most that a rank which generates has to spare until the end."""
        if place not in self._spare:
            tails = [tail for number in range(len(place.seconds)) for tail in place.tails(number)]
            most_s = max((tail.idle_s for tail in tails), default=0.0)
            self._spare[place] = most_s / place.num_instances
        return self._spare[place]


def _ends(masks: Iterable[int]) -> Iterable[int]:
    """The ranks at either end of each mesh, as masks."""
    for mask in masks:
        yield mask & -mask
        yield 1 << mask.bit_length() - 1

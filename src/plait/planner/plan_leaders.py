"""The best plans of a search, one of each kind: what a user may compare the best with."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from plait.cost.cluster import ClusterSpec
from plait.planner.plan_objective import Valued
from plait.simulator.places import Place

State = tuple[Place, ...]

MOST_LEADERS = 8
"""Kinds of plans, of which the best is kept."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was valued."""

    places: State
    valued: Valued
    name: str = ""


class Leaders:
    """The best usable plan of each kind, of the kinds whose best are best."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        self._best: dict[tuple[object, ...], Candidate] = {}

    @property
    def worst(self) -> float:
        """The value that a plan must beat to become one of the leaders."""
        if len(self._best) < MOST_LEADERS:
            return inf
        return max(leader.valued.value for leader in self._best.values())

    def keep(self, candidate: Candidate) -> None:
        """Take a usable plan among them if it is one of the best."""
        if candidate.valued.value >= self.worst:
            return
        kind = _kind(candidate.places, self._cluster)
        if kind not in self._best or candidate.valued.value < self._best[kind].valued.value:
            self._best[kind] = candidate
            if len(self._best) > MOST_LEADERS:
                del self._best[max(self._best, key=lambda leader: self._best[leader].valued.value)]

    def ordered(self, best: Candidate | None) -> tuple[Candidate, ...]:
        """From the best to the worst; of equal ones `best` is the first."""
        return tuple(sorted(self._best.values(), key=lambda leader: (leader.valued.value, leader is not best)))


def _kind(places: State, cluster: ClusterSpec) -> tuple[object, ...]:
    """Equal for plans that differ in nothing but which of equal devices do what: sizes, kinds of devices, parallelism,
    and which calls share devices."""
    on = lambda mesh: (len(mesh), cluster.kinds_of(mesh.ranks))
    sizes = tuple((on(layout.mesh), layout.parallelism, p.placements[0].after) for p in places for layout in p.layouts)
    shared = tuple(one.mask & other.mask != 0 for n, one in enumerate(places) for other in places[:n])
    return (sizes, shared)

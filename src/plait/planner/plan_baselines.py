"""Plans that others would make, judged by the same simulator: named ones, ReaL's heuristic, HybridFlow's mapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import inf

from plait.planner.plan_space import Form, PlanSpace
from plait.schedule.named_plans import BASELINES
from plait.simulator.places import Place

MOST_UNITS = 16
"""Parts of a cluster that HybridFlow's mapper deals out."""


def baselines(space: PlanSpace) -> dict[str, tuple[Place, ...]]:
    """By name, those that the problem has."""
    made = {name: make(space) for name, make in MAKERS.items()}
    return {BASELINES[name]: places for name, places in made.items() if places is not None}


def one_mesh(space: PlanSpace) -> tuple[Place, ...] | None:
    """Every call on all devices, each as fast as it can be there by itself."""
    everyone = tuple(range(space.problem.num_devices))
    return _fastest(space, [everyone] * len(space.graph.slots))


def real_heuristic(space: PlanSpace) -> tuple[Place, ...] | None:
    """Every call on the whole cluster, tensor parallel inside a node, a pipeline over nodes, one copy (ReaL, arXiv
    2406.14088, its Megatron heuristic); copies only where a model cannot be cut so often."""
    cluster = space.problem.costs.cluster.mesh_cluster
    everyone = tuple(range(cluster.num_devices))
    places = []
    for slot in range(len(space.graph.slots)):
        allowed = space.parallelisms(slot, everyone)
        wanted = max(
            allowed,
            key=lambda sizes: (min(sizes.tp, cluster.devices), sizes.pp <= cluster.nodes, sizes.pp),
            default=None,
        )
        if wanted is None:
            return None
        places.append(space.place(slot, everyone, space.form_of(slot, everyone, wanted)))
    return tuple(places)


def set_partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """Every way to put items into sets, as HybridFlow colocates models; as many as Bell's number."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in set_partitions(rest):
        yield [[first], *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], [first, *part], *parts[place + 1 :]]


def compositions(total: int, least: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to deal `total` out in order, at least `least` to each."""
    spare = total - sum(least)
    if spare < 0:
        return
    for cuts in combinations(range(spare + len(least) - 1), len(least) - 1):
        ends = (-1, *cuts, spare + len(least) - 1)
        yield tuple(low + ends[i + 1] - ends[i] - 1 for i, low in enumerate(least))


def hybridflow(space: PlanSpace) -> tuple[Place, ...] | None:
    """HybridFlow's auto-mapping (arXiv 2409.19256, algorithm 1): sets of models, the devices of each set, and the best
    strategy of each call by itself (algorithm 2); the cost is the sum over stages of the slowest set. Devices are dealt
    out in units of a sixteenth of the cluster."""
    graph, devices = space.graph, space.problem.num_devices
    unit = max(1, devices // MOST_UNITS)
    units = devices // unit
    stages = [("decode",), ("score",), ("train",)]
    seconds: dict[tuple[int, int, int], float] = {}

    def of(slot: int, first: int, count: int) -> float:
        """The fastest that a slot can be on these units."""
        if (slot, first, count) not in seconds:
            forms = space.forms(slot, _ranks(first, count, unit))
            seconds[slot, first, count] = forms[0].seconds if forms else inf
        return seconds[slot, first, count]

    def stage_s(sets: Sequence[Sequence[str]], sizes: Sequence[int], modes: Sequence[str]) -> float:
        first, slowest = 0, 0.0
        for members, count in zip(sets, sizes, strict=True):
            mine = [slot for role in members for mode, slot in graph.slots_of(role).items() if mode in modes]
            slowest = max(slowest, sum(of(slot, first, count) for slot in mine))
            first += count
        return slowest

    best, least = None, inf
    for sets in set_partitions(graph.roles):
        for sizes in compositions(units, [1] * len(sets)):
            total = sum(stage_s(sets, sizes, modes) for modes in stages)
            if total < least:
                best, least = (sets, sizes), total
    if best is None:
        return None
    meshes: dict[str, tuple[int, ...]] = {}
    first = 0
    for members, count in zip(*best, strict=True):
        meshes |= dict.fromkeys(members, _ranks(first, count, unit))
        first += count
    return _fastest(space, [meshes[slot.role] for slot in graph.slots])


def _ranks(first: int, count: int, unit: int) -> tuple[int, ...]:
    return tuple(range(first * unit, (first + count) * unit))


def _fastest(space: PlanSpace, meshes: Sequence[tuple[int, ...]]) -> tuple[Place, ...] | None:
    """Each slot as fast as it can be on its mesh; of a role's calls on the same mesh as many in one layout as pays is
    left to a search."""
    places = []
    for slot, ranks in enumerate(meshes):
        forms: Sequence[Form] = space.forms(slot, ranks)
        if not forms:
            return None
        places.append(space.place(slot, ranks, forms[0]))
    return tuple(places)


def leanest(space: PlanSpace) -> tuple[Place, ...] | None:
    """Every call on all devices with as little memory as can be, all that may leave its device offloaded."""
    everyone = tuple(range(space.problem.num_devices))
    places = []
    for slot in range(len(space.graph.slots)):
        forms = space.forms(slot, everyone)
        if not forms:
            return None
        form = min(forms, key=lambda candidate: candidate.static_bytes + candidate.active_bytes)
        places.append(space.place(slot, everyone, form, "offload"))
    return tuple(places)


MAKERS: Mapping[str, Callable[[PlanSpace], tuple[Place, ...] | None]] = {
    "one-mesh": one_mesh,
    "real": real_heuristic,
    "hybridflow": hybridflow,
}
"""By the words of `named_plans.BASELINES`."""

"""Plans that others would make, valued by the same simulator: named ones, ReaL's heuristic, HybridFlow's mapper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plait.planner.hybridflow import hybridflow
from plait.planner.plan_space import PlanSpace
from plait.planner.slot_forms import Form
from plait.schedule.named_plans import BASELINES
from plait.simulator.places import Place


def baselines(space: PlanSpace) -> dict[str, tuple[Place, ...]]:
    """By name, those that the problem has."""
    made = {name: make(space) for name, make in MAKERS.items()}
    return {BASELINES[name]: space.lawful(places) for name, places in made.items() if places is not None}


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
        allowed = space.forms.parallelisms(slot, everyone)
        wanted = max(
            allowed,
            key=lambda sizes: (min(sizes.tp, cluster.devices), sizes.pp <= cluster.nodes, sizes.pp),
            default=None,
        )
        if wanted is None:
            return None
        places.append(space.place(slot, everyone, space.forms.form_of(slot, everyone, wanted)))
    return tuple(places)


def _fastest(space: PlanSpace, meshes: Sequence[tuple[int, ...]]) -> tuple[Place, ...] | None:
    """Each slot as fast as it can be on its mesh; of a role's calls on the same mesh as many in one layout as pays is
    left to a search."""
    places = []
    for slot, ranks in enumerate(meshes):
        forms: Sequence[Form] = space.forms.of(slot, ranks)
        if not forms:
            return None
        places.append(space.place(slot, ranks, forms[0]))
    return tuple(places)


MAKERS: Mapping[str, Callable[[PlanSpace], tuple[Place, ...] | None]] = {
    "one-mesh": one_mesh,
    "real": real_heuristic,
    "hybridflow": hybridflow,
}
"""By the words of `named_plans.BASELINES`."""

"""How many nodes of a cluster a run needs, whether they have room for it, and what is said where they have not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.errors import ConfigError

PASSED = ("PYTHONPATH", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE")
PASSED_BEGINNINGS = ("PLAIT_", "NCCL_", "GLOO_", "TORCH_", "CUBLAS_", "MKL_", "OMP_")
"""Variables of the command that ranks get beside those of the cluster's own processes. The run's key is none."""


@dataclass(frozen=True)
class Need:
    """What a run asks of a cluster.

    per_rank: of each resource, what a rank needs
    nodes:    machines with equally many ranks each; 0: as few as have room
    """

    num_ranks: int
    per_rank: Mapping[str, float]
    nodes: int = 0

    def share(self, nodes: int) -> dict[str, float]:
        """What one of so many nodes must have of each resource."""
        return {name: self.num_ranks // nodes * amount for name, amount in self.per_rank.items()}


@dataclass(frozen=True)
class Room:
    """What a node of the cluster has of each resource, and what of that no placement group has."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class Rooms:
    """The nodes of a cluster, by name.

    elsewhere: of each resource, what is used on nodes of which Ray does not say which: as much less is free there
    """

    nodes: Sequence[Room]
    elsewhere: Mapping[str, float]

    @classmethod
    def of(
        cls,
        nodes: Sequence[Mapping[str, Any]],
        groups: Mapping[str, Mapping[str, Any]],
        whole: Mapping[str, float],
        free: Mapping[str, float],
    ) -> Rooms:
        """What Ray tells: `ray.nodes()`, `ray.util.placement_group_table()`, `ray.cluster_resources()` and
        `ray.available_resources()`. What placement groups have is known by node; of all other tasks and actors only
        what they use together, which is theirs where there is but one node."""
        live = {node["NodeID"]: node for node in nodes if node["Alive"]}
        used_by_node: dict[str, Counter[str]] = {node: Counter() for node in live}
        for group in groups.values():
            for index, bundle in group["bundles"].items():
                where = group["bundles_to_node_id"].get(index)  # of one that waits: no node
                if where in used_by_node and group["state"] != "REMOVED":
                    used_by_node[where].update(bundle)
        used = {name: total - free.get(name, 0.0) for name, total in whole.items()}
        elsewhere = {
            name: amount - sum(used_there[name] for used_there in used_by_node.values())
            for name, amount in used.items()
        }
        elsewhere = {name: amount for name, amount in elsewhere.items() if amount > _NOTHING}
        if len(live) == 1:
            used_by_node[next(iter(live))].update(elsewhere)
            elsewhere = {}
        rooms = [
            Room(
                f"{node['NodeManagerHostname']} ({number[:8]})",
                node["Resources"],
                {name: max(0.0, total - used_by_node[number][name]) for name, total in node["Resources"].items()},
            )
            for number, node in live.items()
        ]
        return cls(sorted(rooms, key=lambda room: room.name), elsewhere)


_NOTHING = 1e-6
"""Shares of a core are summed in floating point."""


def node_counts(need: Need, rooms: Rooms) -> tuple[list[int], list[int]]:
    """Possible numbers of nodes for the ranks, smallest first: (those that fit now, beside what others are known to
    use; those that would fit on idle nodes).

    Raises:
        ConfigError: the second list would be empty; says what is needed, and what each node has.
    """
    if need.nodes and need.num_ranks % need.nodes:
        raise ConfigError(f"{need.num_ranks} ranks (key `devices`) cannot be divided among --nodes {need.nodes}")
    counts = [need.nodes] if need.nodes else [n for n in range(1, need.num_ranks + 1) if need.num_ranks % n == 0]

    def held(resources_of_nodes: Sequence[Mapping[str, float]]) -> list[int]:
        return [
            count
            for count in counts
            if sum(_holds(resources, need.share(count)) for resources in resources_of_nodes) >= count
        ]

    ever = held([room.total for room in rooms.nodes])
    if not ever:
        raise ConfigError(
            "`launcher` ray: the nodes of the cluster could not hold the ranks if they were empty; give fewer "
            f"`devices`, or other --nodes\n{table(need, need.nodes, rooms)}"
        )
    return held([room.free for room in rooms.nodes]), ever


def table(need: Need, nodes: int, rooms: Rooms) -> str:
    """What is needed, and what is free on which node. `nodes` 0: on how many is not settled."""
    whole = f"{need.num_ranks} ranks, each with {_amounts(need.per_rank)}"
    lines = [f"needed: {whole}" + (f"; {_amounts(need.share(nodes))} on each of {nodes} nodes" if nodes else "")]
    width = max((len(room.name) for room in rooms.nodes), default=4)
    lines.append(f"{'node':<{width}}" + "".join(f"{name + ' free':>12}{'of':>8}" for name in need.per_rank))
    for room in rooms.nodes:
        cells = (f"{room.free.get(name, 0.0):>12g}{room.total.get(name, 0.0):>8g}" for name in need.per_rank)
        lines.append(f"{room.name:<{width}}{''.join(cells)}")
    used = {name: rooms.elsewhere[name] for name in need.per_rank if name in rooms.elsewhere}
    if used:
        lines.append(f"less {_amounts(used)} of tasks and actors without a placement group: Ray does not say on which")
    return "\n".join(lines)


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the command that the ranks get."""
    named = {name: value for name, value in environ.items() if name in PASSED or name.startswith(PASSED_BEGINNINGS)}
    named.pop("PLAIT_RUN_KEY", None)
    return named


def _holds(resources: Mapping[str, float], share: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= amount for name, amount in share.items())


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())

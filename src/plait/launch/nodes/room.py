"""How many nodes of a cluster a run needs, whether they have room for it, and what is said where they have not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        return {name: self.num_ranks // nodes * each for name, each in self.per_rank.items()}


@dataclass(frozen=True)
class Room:
    """What a node of the cluster has of each resource, and what of that nobody uses; None: that is not known."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None


def num_nodes(need: Need, rooms: Sequence[Room]) -> int:
    """On how many nodes the ranks are to be: on the fewest that have room now, else on the fewest that would have it if
    nobody else used them.

    Raises:
        ConfigError: no nodes would; says what is needed, and what there is on which node.
    """
    if need.nodes and need.num_ranks % need.nodes:
        raise ConfigError(f"{need.num_ranks} ranks (key `devices`) cannot be divided among --nodes {need.nodes}")
    counts = [need.nodes] if need.nodes else [n for n in range(1, need.num_ranks + 1) if need.num_ranks % n == 0]
    for there in ([room.free or {} for room in rooms], [room.total for room in rooms]):
        for count in counts:
            if sum(_holds(one, need.share(count)) for one in there) >= count:
                return count
    raise ConfigError(
        "`launcher` ray: the nodes of the cluster could not hold the ranks if they were empty; give fewer "
        f"`devices`, or other --nodes\n{table(need, need.nodes, rooms)}"
    )


def table(need: Need, nodes: int, rooms: Sequence[Room]) -> str:
    """What is needed, and what is free on which node. `nodes` 0: on how many is not settled."""
    whole = f"{need.num_ranks} ranks, each with {_amounts(need.per_rank)}"
    lines = [f"needed: {whole}" + (f"; {_amounts(need.share(nodes))} on each of {nodes} nodes" if nodes else "")]
    width = max((len(room.name) for room in rooms), default=4)
    lines.append(f"{'node':<{width}}" + "".join(f"{name + ' free':>12}{'of':>8}" for name in need.per_rank))
    for room in rooms:
        cells = ""
        for name in need.per_rank:
            free = "?" if room.free is None else f"{room.free.get(name, 0.0):g}"
            cells += f"{free:>12}{room.total.get(name, 0.0):>8g}"
        lines.append(f"{room.name:<{width}}{cells}")
    return "\n".join(lines)


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the command that the ranks get."""
    named = {name: value for name, value in environ.items() if name in PASSED or name.startswith(PASSED_BEGINNINGS)}
    named.pop("PLAIT_RUN_KEY", None)
    return named


def _holds(there: Mapping[str, float], share: Mapping[str, float]) -> bool:
    return all(there.get(name, 0.0) >= amount for name, amount in share.items())


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())

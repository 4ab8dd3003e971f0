"""What a plan counts of the machines of a run besides this one: the links between them, and their memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.cost.cluster import ClusterSpec
from plait.cost.hardware import Link

UNKNOWN = Link(0.125e9, 500e-6)
"""Between machines of which nothing is known: one gigabit a second."""


@dataclass(frozen=True)
class Network:
    """
    link:         between machines, as messages to the slowest of them took; None: it was not measured
    memory_bytes: of the one with least memory; None: as much as this one has
    """

    link: Link | None = None
    memory_bytes: int | None = None

    @property
    def label(self) -> str:
        """Where the numbers of links between nodes come from, in words."""
        link = self.link or UNKNOWN
        how = "not measured, taken as" if self.link is None else "as they were measured over TCP,"
        return f"links between nodes {how} {link.bandwidth / 1e9:.2g} GB/s and {link.latency_s * 1e6:.0f} us"

    def joins(self, cluster: ClusterSpec, nodes: int, device: str) -> ClusterSpec:
        """So many machines, each as `cluster` is.

        Args:
            device: cpu or cuda; processes of a CPU share their machine's memory.
        """
        unit = cluster.device
        if device == "cpu" and self.memory_bytes is not None:
            unit = replace(unit, memory_bytes=min(unit.memory_bytes, self.memory_bytes // cluster.num_devices))
        link = self.link or UNKNOWN
        return replace(cluster, nodes=nodes, inter=link, device=unit, name=f"{nodes} machines like this")


NOT_MEASURED = Network()


@dataclass(frozen=True)
class Machines:
    """Where a run is, and how its plan may be predicted.

    count:    machines like this one, with equally many devices each
    network:  what is known of them
    measures: a profile of this one is made where none fits that was kept; False: by what is kept, or what its kind
              does
    alike:    all have devices of one kind, as far as they say it
    """

    count: int = 1
    network: Network = NOT_MEASURED
    measures: bool = True
    alike: bool = True


THIS_ONE = Machines()

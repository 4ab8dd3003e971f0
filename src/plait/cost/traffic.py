"""Seconds of what devices of a layout tell each other: sums and gathers over its axes, and hops between its stages.

A ring over p devices carries 2 (p - 1) / p of the bytes for a sum, half as much for a gather. Rings that leave a node
share its link to the others. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from plait.cost.cluster import ClusterSpec
from plait.layout.mesh import Layout

Axis = Literal["dp", "tp", "pp"]


@dataclass(frozen=True)
class Traffic:
    """What messages of one layout take on a cluster."""

    cluster: ClusterSpec
    layout: Layout

    def all_reduce(self, axis: Axis, num_bytes: float) -> float:
        """A sum of so many bytes over the devices along an axis, all such groups at the same time."""
        return self._ring(axis, num_bytes, 2)

    def gather(self, axis: Axis, num_bytes: float) -> float:
        """As `all_reduce`, a gather whose result has so many bytes, or the scatter of a sum of so many."""
        return self._ring(axis, num_bytes, 1)

    def hop(self, num_bytes: float) -> float:
        """From each device of a pipeline stage to its peer in the next one; the slowest of these hops."""
        if self.layout.parallelism.pp == 1:
            return 0.0
        return self._pass(self._crossings, num_bytes)

    def _ring(self, axis: Axis, num_bytes: float, times: int) -> float:
        size = getattr(self.layout.parallelism, axis)
        if size == 1:
            return 0.0
        return self._pass(
            _sharing(self.cluster.devices_per_node, self.layout, axis), times * (size - 1) / size * num_bytes
        )

    def _pass(self, sharing: int, num_bytes: float) -> float:
        """
        Args:
            sharing: how many share the link out of a node; 0: nobody leaves it.
        """
        link = self.cluster.inter if sharing else self.cluster.intra
        return link.latency_s + max(1, sharing) * num_bytes / (link.bandwidth * self.cluster.software.links)

    @cached_property
    def _crossings(self) -> int:
        return _hops(self.cluster.devices_per_node, self.layout)


@lru_cache(maxsize=65536)
def _sharing(per_node: int, layout: Layout, axis: Axis) -> int:
    """Groups along an axis that have members in one node and elsewhere; of the node with most of them."""
    groups: dict[tuple[int, int], set[int]] = {}
    for rank in layout.mesh.ranks:
        at = layout.coordinates(rank)
        key = {"dp": (at.tp, at.pp), "tp": (at.dp, at.pp), "pp": (at.dp, at.tp)}[axis]
        groups.setdefault(key, set()).add(rank // per_node)
    crossing: dict[int, int] = {}
    for nodes in groups.values():
        for node in nodes if len(nodes) > 1 else ():
            crossing[node] = crossing.get(node, 0) + 1
    return max(crossing.values(), default=0)


@lru_cache(maxsize=65536)
def _hops(per_node: int, layout: Layout) -> int:
    """Devices of one node whose peers in the next stage are on another, all of one stage; the most of them."""
    sizes = layout.parallelism
    leaving: dict[tuple[int, int], int] = {}
    for dp in range(sizes.dp):
        for pp in range(sizes.pp - 1):
            for tp in range(sizes.tp):
                node, other = (layout.rank_at(dp, tp, stage) // per_node for stage in (pp, pp + 1))
                if node != other:
                    leaving[node, pp] = leaving.get((node, pp), 0) + 1
    return max(leaving.values(), default=0)

"""Seconds of what devices of a layout tell each other: sums and gathers over its axes, and hops between its stages.

A ring over p devices carries 2 (p - 1) / p of the bytes for a sum, half as much for a gather. Rings that leave a node
share its link to the others. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from plait.layout.mesh import Layout

if TYPE_CHECKING:
    from plait.cost.cluster import ClusterSpec
    from plait.cost.hardware import Link

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

    def broadcast(self, axis: Axis, num_bytes: float) -> float:
        """As `all_reduce`, so many bytes that one device of each group has go to all others."""
        size = getattr(self.layout.parallelism, axis)
        return self._ring(axis, num_bytes * size / max(1, size - 1), 1)

    def hop(self, num_bytes: float) -> float:
        """From each device of a pipeline stage to its peer in the next one; the slowest of these hops."""
        if self.layout.parallelism.pp == 1:
            return 0.0
        return self._pass(_hops(self.cluster.devices_per_node, self.layout), num_bytes, self.cluster.near)

    def _ring(self, axis: Axis, num_bytes: float, times: int) -> float:
        size = getattr(self.layout.parallelism, axis)
        if size == 1:
            return 0.0
        sharing = _sharing(self.cluster.devices_per_node, self.layout, axis)
        return self._pass(sharing, times * (size - 1) / size * num_bytes, self.cluster.intra)

    def _pass(self, sharing: int, num_bytes: float, near: Link) -> float:
        """
        Args:
            sharing: how many share the link out of a node; 0: nobody leaves it.
            near: within a node.
        """
        link = self.cluster.inter if sharing else near
        return link.latency_s + max(1, sharing) * num_bytes / (link.bandwidth * self.cluster.software.links)


@lru_cache(maxsize=65536)
def _sharing(per_node: int, layout: Layout, axis: Axis) -> int:
    """Groups along an axis that have members in one node and elsewhere; of the node with most of them."""
    nodes = np.moveaxis(_nodes(per_node, layout), ("dp", "pp", "tp").index(axis), -1)
    groups = np.sort(nodes.reshape(-1, nodes.shape[-1]), axis=1)
    crossing = groups[groups[:, 0] != groups[:, -1]]
    first = np.ones(crossing.shape, bool)
    first[:, 1:] = crossing[:, 1:] != crossing[:, :-1]
    return int(np.bincount(crossing[first]).max(initial=0))


@lru_cache(maxsize=65536)
def _hops(per_node: int, layout: Layout) -> int:
    """Devices of one node whose peers in the next stage are on another, all of one stage; the most of them."""
    nodes = _nodes(per_node, layout)
    leaving = nodes[:, :-1] != nodes[:, 1:]
    return max(
        (int(np.bincount(nodes[:, stage][leaving[:, stage]]).max(initial=0)) for stage in range(nodes.shape[1] - 1)),
        default=0,
    )


def _nodes(per_node: int, layout: Layout) -> NDArray[np.int64]:
    """[dp, pp, tp] the node of each rank."""
    sizes = layout.parallelism
    return np.array(layout.mesh.ranks).reshape(sizes.dp, sizes.pp, sizes.tp) // per_node

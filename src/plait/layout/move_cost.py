"""How long the links of given speeds, and ranks that copy, are busy with a move."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from plait.layout.mesh import Cluster
from plait.layout.move_plan import Traffic


@dataclass(frozen=True)
class Bandwidths:
    """What links carry, in bytes per second and direction; latencies in seconds per message.

    near:   between ranks of a node, for each rank
    far:    into or out of a node
    copy:   of a local copy, bytes written
    store:  of one file
    shared: all ranks of a node share `far`; otherwise each rank has as much for itself
    """

    near: float
    far: float
    copy: float
    store: float = 2e9
    near_latency: float = 5e-6
    far_latency: float = 20e-6
    store_latency: float = 1e-4
    shared: bool = True


@dataclass(frozen=True)
class MoveCost:
    """In seconds.

    bound:  the busiest link alone; no order of these messages takes less
    copies: the slowest rank's local copies
    """

    bound: float
    copies: float


def cost(traffic: Traffic, bandwidths: Bandwidths) -> MoveCost:
    """What each link carries of the messages, and each rank copies."""
    busy: dict[Link, float] = defaultdict(float)
    for (sender, receiver), (num_messages, num_bytes) in sorted(traffic.carried.items()):
        way = way_of(traffic.cluster, sender, receiver, bandwidths)
        seconds = num_messages * way.latency + num_bytes / way.rate
        for link in way.links:
            busy[link] += seconds
    copies = max(traffic.copied.values(), default=0) / bandwidths.copy
    return MoveCost(max(busy.values(), default=0.0), copies)


Link = tuple[str, int]
"""(what it is, the rank, node or store that has it)"""


class Way(NamedTuple):
    """The links that a message keeps busy, the rate of the slowest, and the latency."""

    links: tuple[Link, Link]
    rate: float
    latency: float


def way_of(cluster: Cluster, sender: int, receiver: int, bandwidths: Bandwidths) -> Way:
    """The way from a rank or store to another."""
    if cluster.is_store(sender) or cluster.is_store(receiver):
        store, rank = (sender, receiver) if cluster.is_store(sender) else (receiver, sender)
        return Way((("store", store), ("disk of", rank)), bandwidths.store, bandwidths.store_latency)
    origin, goal = cluster.node_of(sender), cluster.node_of(receiver)
    if origin == goal:
        return Way((("near out", sender), ("near in", receiver)), bandwidths.near, bandwidths.near_latency)
    if bandwidths.shared:
        return Way((("node out", origin), ("node in", goal)), bandwidths.far, bandwidths.far_latency)
    return Way((("far out", sender), ("far in", receiver)), bandwidths.far, bandwidths.far_latency)

"""How long a move takes over links of given speeds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

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

    seconds: until every rank is done, each finishing a round before it begins its next
    bound:   the busiest link alone; no order of these messages takes less
    copies:  the slowest rank's local copies, part of `seconds`
    """

    seconds: float
    bound: float
    copies: float


def cost(traffic: Traffic, bandwidths: Bandwidths) -> MoveCost:
    """Play the messages in their order over the links."""
    busy: dict[tuple[str, int], float] = defaultdict(float)
    free: dict[tuple[str, int], float] = defaultdict(float)
    copies = {rank: size / bandwidths.copy for rank, size in traffic.copied.items()}
    done = dict(copies)
    """Rank → end of its last finished round."""
    current: dict[int, tuple[int, float]] = {}
    """Rank → the round it is in and the end of that round so far."""
    ways: dict[tuple[int, int], tuple[list[tuple[str, int]], float, float]] = {}
    for number, sender, receiver, size in traffic.messages:
        ranks = [end for end in (sender, receiver) if not traffic.cluster.is_store(end)]
        for end in ranks:
            if current.get(end, (-1, 0.0))[0] < number:
                done[end] = max(done.get(end, 0.0), current.get(end, (-1, 0.0))[1])
        if (sender, receiver) not in ways:
            ways[sender, receiver] = _links(traffic.cluster, sender, receiver, bandwidths)
        links, rate, latency = ways[sender, receiver]
        start = max([done[end] for end in ranks] + [free[link] for link in links])
        seconds = latency + size / rate
        for link in links:
            busy[link] += seconds
            free[link] = start + seconds
        for end in ranks:
            before = current.get(end, (-1, 0.0))
            current[end] = (number, max(start + seconds, before[1] if before[0] == number else 0.0))
    ends = [end for _, end in current.values()]
    return MoveCost(
        max([*ends, *copies.values()], default=0.0), max(busy.values(), default=0.0), max(copies.values(), default=0.0)
    )


def _links(
    cluster: Cluster, sender: int, receiver: int, bandwidths: Bandwidths
) -> tuple[list[tuple[str, int]], float, float]:
    """The links that a message keeps busy, the rate of the slowest, and the latency."""
    if cluster.is_store(sender) or cluster.is_store(receiver):
        store, rank = (sender, receiver) if cluster.is_store(sender) else (receiver, sender)
        return [("store", store), ("disk of", rank)], bandwidths.store, bandwidths.store_latency
    origin, goal = cluster.node_of(sender), cluster.node_of(receiver)
    if origin == goal:
        return [("near out", sender), ("near in", receiver)], bandwidths.near, bandwidths.near_latency
    if bandwidths.shared:
        return [("node out", origin), ("node in", goal)], bandwidths.far, bandwidths.far_latency
    return [("far out", sender), ("far in", receiver)], bandwidths.far, bandwidths.far_latency

"""What other systems move between the same two layouts, in bytes, counted in their favour where they leave a choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from plait.layout.boxes import Box, Holding
from plait.layout.holdings import Holdings, weights
from plait.layout.mesh import Cluster, Layout
from plait.layout.params import Param, Parameters


@dataclass
class Volume:
    """Bytes. received: of each rank; entering, leaving: of each node, over the network."""

    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    entering: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    leaving: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def total(self) -> int:
        return sum(self.received.values())

    @property
    def busiest_node(self) -> int:
        return max([0, *self.entering.values(), *self.leaving.values()])


def gather_all(source: Holdings, target: Holdings, cluster: Cluster) -> Volume:
    """Every rank of the target gathers the whole model, then keeps its slice (HybridFlow-V, DeepSpeed-Chat).

    In its favour: no rank receives what it holds, a byte enters a node once, and the nodes that hold parts of the model
    share the sending equally.
    """
    whole = sum(param.num_elements for param in source.params) * target.item_bytes
    volume, nodes = Volume(), defaultdict(list)
    for rank in target.ranks:
        volume.received[rank] = whole - held_bytes(source, [rank], target.item_bytes)
        nodes[cluster.node_of(rank)].append(rank)
    for node in nodes:
        volume.entering[node] = whole - held_bytes(source, node_ranks(source, cluster, node), target.item_bytes)
    senders = {cluster.node_of(rank) for rank in source.ranks}
    for node in senders:
        volume.leaving[node] = sum(volume.entering.values()) // len(senders)
    return volume


def broadcasts(parameters: Parameters, before: Layout, after: Layout, cluster: Cluster, size: int) -> Volume | None:
    """ReaL's plan (arXiv 2406.14088; `param_realloc.py` of its code): one broadcast for each pair of shards that meet.

    A source node serves its own receivers; all others are served by the first source node. The sender of a node is a
    rank that also receives, if there is one. Receivers that hold the shard still take part. None where one tp size does
    not divide the other: it is refused. In its favour: a broadcast enters each node once.

    size: bytes of an element.
    """
    tps = sorted((before.parallelism.tp, after.parallelism.tp))
    if tps[1] % tps[0]:
        return None
    volume = Volume()
    holders, needers = shards_of(parameters, before), shards_of(parameters, after)
    for param in range(len(parameters.params)):
        for box, sources in holders[param].items():
            for other, receivers in needers[param].items():
                if moved := common(box, other) * size:
                    broadcast(volume, sources, receivers, moved, cluster)
    return volume


def broadcast(volume: Volume, sources: list[int], receivers: list[int], moved: int, cluster: Cluster) -> None:
    """The broadcasts of one pair of shards, one for each source node that serves someone."""
    groups: dict[int, list[int]] = defaultdict(list)
    source_nodes = sorted({cluster.node_of(rank) for rank in sources})
    for rank in receivers:
        node = cluster.node_of(rank)
        groups[node if node in source_nodes else source_nodes[0]].append(rank)
    for node, group in groups.items():
        local = [rank for rank in sources if cluster.node_of(rank) == node]
        sender = next((rank for rank in local if rank in group), local[0])
        for rank in group:
            volume.received[rank] += moved * (rank != sender)
        for other in {cluster.node_of(rank) for rank in group} - {node}:
            volume.entering[other] += moved
            volume.leaving[node] += moved


def micro_dp(parameters: Parameters, before: Layout, after: Layout, size: int) -> Volume | None:
    """HybridFlow's 3D-HybridEngine (arXiv 2409.19256, table 2): all-gathers inside micro-DP groups.

    None where it does not apply: other devices, generation sizes that do not divide those of training, or heads that do
    not, so that the new shard of a rank is without some of its old one. `after` has its ranks in HybridFlow's order.
    Nodes are left out.
    """
    old, new = before.parallelism, after.parallelism
    if set(before.mesh.ranks) != set(after.mesh.ranks) or old.tp % new.tp or old.pp % new.pp:
        return None
    source, target = weights(parameters, before, "bfloat16"), weights(parameters, after, "bfloat16")
    volume = Volume()
    for rank in after.mesh.ranks:
        kept = sum(common(piece.box, other.box) for piece, other in same_parameter(source, target, rank))
        mine = sum(holding.box.num_elements for holding in source.ranks[rank])
        if kept < mine:
            return None
        volume.received[rank] = (sum(holding.box.num_elements for holding in target.ranks[rank]) - mine) * size
    return volume


def same_parameter(source: Holdings, target: Holdings, rank: int) -> Iterator[tuple[Holding, Holding]]:
    """What a rank holds of a parameter and what it will hold of it."""
    new = {holding.param: holding for holding in target.ranks[rank]}
    return ((old, new[old.param]) for old in source.ranks[rank] if old.param in new)


def shards_of(parameters: Parameters, layout: Layout) -> list[dict[Box, list[int]]]:
    """For each parameter its distinct blocks and the ranks that hold each."""
    shards: list[dict[Box, list[int]]] = [defaultdict(list) for _ in parameters.params]
    for rank, held in weights(parameters, layout, "bfloat16").ranks.items():
        for holding in held:
            shards[holding.param][holding.box].append(rank)
    return shards


def common(one: Box, other: Box) -> int:
    number = 1
    for low in (0, 2, 4):
        number *= max(0, min(one[low + 1], other[low + 1]) - max(one[low], other[low]))
    return number


def node_ranks(held: Holdings, cluster: Cluster, node: int) -> list[int]:
    return [rank for rank in held.ranks if cluster.node_of(rank) == node]


def held_bytes(held: Holdings, ranks: list[int], size: int) -> int:
    """Bytes of the distinct elements that these ranks hold together. Boxes of one parameter differ in one dim at most,
    or are equal."""
    total = 0
    boxes: dict[int, set[Box]] = defaultdict(set)
    for rank in ranks:
        for holding in held.ranks.get(rank, ()):
            boxes[holding.param].add(holding.box)
    for param, mine in boxes.items():
        total += union(held.params[param], mine)
    return total * size


def union(param: Param, boxes: set[Box]) -> int:
    """Elements in any of these boxes."""
    dims = [dim for dim in range(3) if len({(box[2 * dim], box[2 * dim + 1]) for box in boxes}) > 1]
    if not dims:
        return next(iter(boxes)).num_elements
    assert len(dims) == 1, f"{param.name}: boxes that differ in several dims"
    low, high = 2 * dims[0], 2 * dims[0] + 1
    count, end = 0, -1
    for box in sorted(boxes, key=lambda box: box[low]):
        count += max(0, box[high] - max(end, box[low]))
        end = max(end, box[high])
    return count * (next(iter(boxes)).num_elements // (next(iter(boxes))[high] - next(iter(boxes))[low]))

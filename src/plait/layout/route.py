"""Who sends what to whom, and in which order: balanced senders, no deadlock, at most two buckets per rank.

A class is split into *chunks*. Each chunk is delivered along a tree: into every node that lacks it once, then on to the
ranks of that node that need it. Ranks that have received a chunk serve as senders like those that held it, so a source
that many want sends about one copy and the receivers exchange the rest (van de Geijn's broadcast, as a greedy choice).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappush, heapreplace
from typing import NamedTuple

from plait.layout.atoms import MoveClass, TensorBox
from plait.layout.boxes import Box, boxes_of_range
from plait.layout.mesh import Cluster

PARTS = 24
"""Chunks into which a class is split where it is large enough: divides evenly among 2, 3, 4, 6, 8 and 12 senders."""

SWEEPS = 3
"""Times that the senders of every chunk are chosen; from the second on knowing what all others chose."""


@dataclass(frozen=True)
class Chunk:
    """A part of a class that travels as one message."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    pieces: tuple[TensorBox, ...]
    num_elements: int


class Transfer(NamedTuple):
    """One message. `seq` counts all messages of the move; each rank works through its own in this order.

    In a round a rank sends at most one message and receives at most one.
    """

    seq: int
    round: int
    sender: int
    receiver: int
    chunk: Chunk


def split(move_class: MoveClass, item_bytes: int, bucket_bytes: int, chunk_bytes: int) -> list[Chunk]:
    """Cut a class into equal chunks of at most `bucket_bytes`, and of `chunk_bytes` or more where that leaves one."""
    total = move_class.num_elements
    parts = max(-(-total * item_bytes // bucket_bytes), min(PARTS, total, total * item_bytes // chunk_bytes), 1)
    limit = max(1, bucket_bytes // item_bytes)
    chunks: list[Chunk] = []
    pieces: list[TensorBox] = []
    filled = done = 0

    def close() -> None:
        nonlocal filled, done
        if filled:
            chunks.append(Chunk(move_class.holders, move_class.needers, tuple(pieces), filled))
            done += filled
            pieces.clear()
            filled = 0

    for number, box in move_class.pieces:
        queue = [box]
        while queue:
            box = queue.pop(0)
            goal = min(limit, max(1, -(-(total * (len(chunks) + 1)) // parts) - done))
            size = box.num_elements
            if filled + size <= goal:
                pieces.append((number, box))
                filled += size
            else:
                # A cut between rows keeps pieces whole; a chunk may be short of its goal by less than a row.
                room = goal - filled
                row = _row(box)
                take = room // row * row if room >= row else room if not filled else 0
                pieces.extend((number, part) for part in boxes_of_range(box, 0, take))
                filled += take
                queue = boxes_of_range(box, take, size) + queue
                close()
                continue
            if filled == goal:
                close()
    close()
    return chunks


def _row(box: Box) -> int:
    """Elements between two cuts that leave a box in two boxes."""
    outer, width, inner = box.shape
    return width * inner if outer > 1 else inner if width > 1 else 1


class Loads:
    """Bytes that nodes and ranks send and receive, as far as they have been assigned."""

    def __init__(self) -> None:
        self.node_out: dict[int, int] = defaultdict(int)
        self.far_out: dict[int, int] = defaultdict(int)
        self.far_in: dict[int, int] = defaultdict(int)
        self.near_out: dict[int, int] = defaultdict(int)

    def add(self, edges: Iterable[tuple[int, int]], node_of: dict[int, int], size: int) -> None:
        for sender, receiver in edges:
            if node_of[sender] == node_of[receiver]:
                self.near_out[sender] += size
            else:
                self.node_out[node_of[sender]] += size
                self.far_out[sender] += size
                self.far_in[receiver] += size


def routes(chunks: Sequence[Chunk], cluster: Cluster) -> list[list[tuple[int, int]]]:
    """The (sender, receiver) pairs of each chunk, a sender never before it has the chunk.

    Chunks with fewest holders choose first. In every sweep each chunk in turn takes the least loaded senders given the
    choices of all others; with small chunks this descends to the least sum of squares of the loads, where the greatest
    load is least as well. In the first sweep only holders send: where they are balanced by themselves, nobody forwards.
    """
    node_of = {rank: cluster.node_of(rank) for rank in _ranks(chunks)}
    stores = _stores(chunks, cluster)
    loads = Loads()
    chosen: list[list[tuple[int, int]]] = [[] for _ in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].holders), -chunks[i].num_elements, i))
    for sweep in range(SWEEPS):
        for i in order:
            size = chunks[i].num_elements
            loads.add(chosen[i], node_of, -size)
            chosen[i] = _deliver(chunks[i], loads, node_of, stores, forward=sweep > 0)
    return chosen


def _deliver(
    chunk: Chunk, loads: Loads, node_of: dict[int, int], stores: set[int], forward: bool
) -> list[tuple[int, int]]:
    """Choose the tree of one chunk and add it to the loads.

    forward: ranks that receive it may send it on, if they have less to do than those that hold it.
    """
    size = chunk.num_elements
    having: dict[int, list[int]] = defaultdict(list)
    lacking: dict[int, list[int]] = defaultdict(list)
    for rank in chunk.holders:
        having[node_of[rank]].append(rank)
    for rank in chunk.needers:
        lacking[node_of[rank]].append(rank)
    hops = dict.fromkeys(chunk.holders, 0)
    edges: list[tuple[int, int]] = []
    entries: dict[int, list[int]] = {}
    node_out, far_out, far_in, near_out = loads.node_out, loads.far_out, loads.far_in, loads.near_out
    # The least loaded stands first in a heap; whoever sends is put back with what it has to do then.
    nodes = [(node_out[node], 0, node) for node in having]
    heapify(nodes)
    for node in sorted((node for node in lacking if node not in having), key=lambda node: (node_out[node], node)):
        entry = min(lacking[node], key=lambda rank: (far_in[rank], near_out[rank], rank))
        out, hop, from_node = nodes[0]
        sender = min(having[from_node], key=lambda rank: (far_out[rank], near_out[rank], hops[rank], rank))
        edges.append((sender, entry))
        node_out[from_node] += size
        heapreplace(nodes, (out + size, hop, from_node))
        far_out[sender] += size
        far_in[entry] += size
        lacking[node].remove(entry)
        hops[entry] = hops[sender] + 1
        entries[node] = [entry]
        if forward and entry not in stores:
            having[node].append(entry)
            heappush(nodes, (node_out[node], hops[entry], node))
    for node, ranks in lacking.items():
        have = [(near_out[rank], hops[rank], rank) for rank in entries.get(node) or having[node]]
        heapify(have)
        for _, rank in sorted((near_out[rank], rank) for rank in ranks):
            out, hop, sender = have[0]
            edges.append((sender, rank))
            near_out[sender] += size
            heapreplace(have, (out + size, hop, sender))
            if forward:
                heappush(have, (near_out[rank], hop + 1, rank))
    return edges


def rounds(chunks: Sequence[Chunk], routes: Sequence[Sequence[tuple[int, int]]], cluster: Cluster) -> list[Transfer]:
    """Put the messages into rounds and count them off.

    A message goes into the first round in which its sender has the chunk and neither end is busy in its direction.
    Stores are never busy. Any order that all ranks share is free of deadlocks, even if every message blocks both ends:
    the first message not yet done is next on both.
    """
    sending: dict[int, int] = defaultdict(int)
    receiving: dict[int, int] = defaultdict(int)
    placed: list[tuple[int, int, int, int, int]] = []
    stores = _stores(chunks, cluster)
    for index, (chunk, edges) in enumerate(zip(chunks, routes, strict=True)):
        rounds_of_ranks = dict.fromkeys(chunk.holders, 0)
        for hop, (sender, receiver) in enumerate(edges):
            first = rounds_of_ranks[sender]
            busy = (sending[sender] | receiving[receiver]) >> first
            at = first + (~busy & (busy + 1)).bit_length() - 1
            if sender not in stores:
                sending[sender] |= 1 << at
            if receiver not in stores:
                receiving[receiver] |= 1 << at
            rounds_of_ranks[receiver] = at + 1
            placed.append((at, index, hop, sender, receiver))
    return [
        Transfer(seq, at, sender, receiver, chunks[index])
        for seq, (at, index, _, sender, receiver) in enumerate(sorted(placed))
    ]


def _ranks(chunks: Sequence[Chunk]) -> set[int]:
    return {rank for chunk in chunks for rank in (*chunk.holders, *chunk.needers)}


def _stores(chunks: Sequence[Chunk], cluster: Cluster) -> set[int]:
    return {rank for rank in _ranks(chunks) if cluster.is_store(rank)}


def interleaved(classes: Sequence[Sequence[Chunk]]) -> list[Chunk]:
    """The first chunk of each class, the second of each, …: so that all senders have work from the beginning."""
    places = [(i, number) for number, chunks in enumerate(classes) for i in range(len(chunks))]
    return [classes[number][i] for i, number in sorted(places)]

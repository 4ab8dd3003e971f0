"""Who sends what to whom, and in which order: balanced senders, no deadlock, at most two buckets per rank.

A class is split into *chunks*. Each chunk is delivered along a tree: into every node that lacks it once, then on to the
ranks of that node that need it. Ranks that have received a chunk serve as senders like those that held it, so a source
that many want sends about one copy and the receivers exchange the rest (van de Geijn's broadcast, as a greedy choice).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from plait.layout.atoms import MoveClass, TensorBox
from plait.layout.boxes import Box, boxes_of_range
from plait.layout.mesh import Cluster
from plait.layout.route_kernels import Groups, Ints, choose

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


def routes(chunks: Sequence[Chunk], cluster: Cluster) -> list[Ints]:
    """[messages, 2] sender and receiver of each message of each chunk, a sender never before it has the chunk.

    Chunks with fewest holders choose first. In every sweep each chunk in turn takes the least loaded senders given the
    choices of all others; with small chunks this descends to the least sum of squares of the loads, where the greatest
    load is least as well. In the first sweep only holders send: where they are balanced by themselves, nobody forwards.
    """
    if not chunks:
        return []
    ranks = sorted(_ranks(chunks))
    numbers: dict[Ends, int] = {}
    class_of = [numbers.setdefault((chunk.holders, chunk.needers), len(numbers)) for chunk in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (len(chunks[i].holders), -chunks[i].num_elements, i))
    sizes = np.array([chunk.num_elements for chunk in chunks])
    first_edge = np.cumsum([0, *(len(chunk.needers) for chunk in chunks)])
    groups = _groups(numbers, ranks, cluster)
    edges = choose(groups, np.array(class_of), sizes, np.array(order), first_edge, SWEEPS)
    return np.split(np.array(ranks)[edges], first_edge[1:-1])


Ends = tuple[tuple[int, ...], tuple[int, ...]]
"""Ranks that hold, and ranks that need."""


def _groups(classes: Iterable[Ends], ranks: Sequence[int], cluster: Cluster) -> Groups:
    """The classes node by node, ranks and nodes by their places among all."""
    place = {rank: number for number, rank in enumerate(ranks)}
    nodes = {node: number for number, node in enumerate(dict.fromkeys(map(cluster.node_of, ranks)))}
    node_of = np.array([nodes[cluster.node_of(rank)] for rank in ranks])
    first, node, ends = [0], list[int](), ([], [0], [], [0])
    for of_class in classes:
        mine = [np.array([place[rank] for rank in side], np.int64) for side in of_class]
        own = np.union1d(node_of[mine[0]], node_of[mine[1]])
        for side, flat, bounds in zip(mine, ends[::2], ends[1::2], strict=True):
            bounds.extend(len(flat) + np.searchsorted(node_of[side], own, "right"))
            flat.extend(side)
        node.extend(own)
        first.append(len(node))
    holders, first_holder, needers, first_needer = (np.array(column, np.int64) for column in ends)
    is_store = np.array([cluster.is_store(rank) for rank in ranks])
    return Groups(np.array(first), np.array(node), holders, first_holder, needers, first_needer, node_of, is_store)


def rounds(chunks: Sequence[Chunk], routes: Sequence[Ints], cluster: Cluster) -> list[Transfer]:
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
        for hop, (sender, receiver) in enumerate(edges.tolist()):
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

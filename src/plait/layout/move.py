"""The planner of moves: from any holdings to any others, each byte once.

Enters: what ranks hold and what they need (`layout.holdings`), the cluster. Leaves: a `MovePlan`. It is a pure function
of its arguments, so every rank can compute the same plan for itself.

What holds of every plan:
- a rank receives exactly what it needs and does not hold, nothing twice;
- a byte enters a node at most once, and only one that no rank of the node holds;
- senders carry equal loads as far as the holders allow it;
- each rank works through its messages in the one order of all messages, so no order of arrival can deadlock;
- no rank ever needs more than one bucket for sending and one for receiving besides the buffers of source and target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from plait.layout.atoms import Demand, TensorBox, demand
from plait.layout.boxes import Box, Holding, Slice, aligned_slices, boxes_of_range
from plait.layout.holdings import ITEM_BYTES, Holdings
from plait.layout.mesh import Cluster
from plait.layout.move_plan import Carried, MoveAction, MoveKind, MovePlan, Traffic
from plait.layout.route import Chunk, Transfer, interleaved, rounds, routes, split
from plait.layout.route_kernels import Ints

BUCKET_BYTES = 64 << 20
CHUNK_BYTES = 256 << 10


def plan_move(
    source: Holdings,
    target: Holdings,
    cluster: Cluster,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> MovePlan:
    """Plan the move from `source` to `target`.

    Where a buffer of a rank has the same name in both, it is the same memory: elements that lie in it at the same place
    are a view, and what is written must not be where the source lies (`layout.nesting` arranges that). All other
    buffers are distinct.

    Args:
        bucket_bytes: longest message.
        chunk_bytes: shortest message into which a large class of elements is split.

    Raises:
        LayoutError: a rank needs elements that nobody holds.
    """
    _check_shared_buffers(source, target)
    wire = _wire(source, target)
    needed = demand(source, target)
    chunks, edges = _routed(source, target, needed, cluster, (bucket_bytes, chunk_bytes))
    rows: dict[int, list[MoveAction]] = defaultdict(list)
    limit = max(1, bucket_bytes // target.item_bytes)
    for rank in sorted(needed.kept):
        rows[rank] += _local(source, target, rank, needed.kept[rank], limit)
    for transfer in rounds(chunks, edges, cluster):
        _message(rows, source, target, cluster, transfer)
    ordered = {rank: tuple(rows[rank]) for rank in sorted(rows)}
    return MovePlan(cluster, ordered, source.dtype, target.dtype, wire, bucket_bytes)


def traffic_of(
    source: Holdings,
    target: Holdings,
    cluster: Cluster,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> Traffic:
    """What `plan_move` of these arguments carries, in a fraction of the time: neither the order of messages is worked
    out nor the places of bytes.

    Raises:
        LayoutError: as of `plan_move`.
    """
    needed = demand(source, target)
    chunks, edges = _routed(source, target, needed, cluster, (bucket_bytes, chunk_bytes))
    item_bytes = ITEM_BYTES[_wire(source, target)]
    carried = _carried(chunks, edges, item_bytes)
    copied: dict[int, int] = defaultdict(int)
    for rank, pieces in needed.kept.items():
        actions = _local(source, target, rank, pieces, max(1, bucket_bytes // target.item_bytes))
        copied[rank] += sum(action.num_elements for action in actions if action.kind is MoveKind.COPY)
    doubled = {rank for rank in target.ranks if target.may_double(rank)}
    for chunk in chunks:
        for rank in doubled.intersection(chunk.needers):
            for number, box in chunk.pieces:
                copied[rank] += (len(_apart(target.find(rank, number, box), box)) - 1) * box.num_elements
    return Traffic(cluster, carried, {rank: count * target.item_bytes for rank, count in copied.items() if count})


def _carried(chunks: Sequence[Chunk], edges: Sequence[Ints], item_bytes: int) -> dict[tuple[int, int], Carried]:
    """By sender and receiver."""
    if not chunks:
        return {}
    elements = np.repeat([chunk.num_elements for chunk in chunks], [len(of_chunk) for of_chunk in edges])
    ends, pair_of, counts = np.unique(np.concatenate(edges), axis=0, return_inverse=True, return_counts=True)
    totals = np.zeros(len(ends), np.int64)
    np.add.at(totals, pair_of.reshape(-1), elements)
    rows = zip(ends.tolist(), counts.tolist(), (totals * item_bytes).tolist(), strict=True)
    return {(sender, receiver): Carried(count, num_bytes) for (sender, receiver), count, num_bytes in rows}


def _wire(source: Holdings, target: Holdings) -> str:
    """The dtype of messages."""
    return source.dtype if source.item_bytes < target.item_bytes else target.dtype


def _routed(
    source: Holdings, target: Holdings, needed: Demand, cluster: Cluster, sizes: tuple[int, int]
) -> tuple[list[Chunk], list[Ints]]:
    """What travels, and of each [messages, 2] sender and receiver; `sizes` are those of a bucket and of a chunk."""
    assert sizes[0] >= max(source.item_bytes, target.item_bytes), "a bucket has room for one element at least"
    classes = [split(move_class, ITEM_BYTES[_wire(source, target)], *sizes) for move_class in needed.classes]
    chunks = interleaved(classes)
    return chunks, routes(chunks, cluster)


def _check_shared_buffers(source: Holdings, target: Holdings) -> None:
    for rank, sizes in target.buffers.items():
        for name, size in sizes.items():
            other = source.buffers.get(rank, {}).get(name, size)
            assert other == size, (
                f"buffer {name} of rank {rank} has {other} elements in the source, {size} in the target"
            )
            assert source.dtype == target.dtype or name not in source.buffers.get(rank, {}), (
                f"buffer {name} of rank {rank} has two dtypes, {source.dtype} and {target.dtype}"
            )


def _local(source: Holdings, target: Holdings, rank: int, pieces: list[TensorBox], limit: int) -> list[MoveAction]:
    """Views and copies of what a rank needs and has: one action for all views, copies of `limit` elements at most."""
    views: list[tuple[Slice, Slice]] = []
    copies: list[tuple[Slice, Slice]] = []
    for number, box in pieces:
        origin = source.find(rank, number, box)
        for goal in _apart(target.find(rank, number, box), box):
            if any(holding.at(box) == goal.at(box) for holding in origin):
                views.append((goal.at(box), goal.at(box)))
            else:
                for low in range(0, box.num_elements, limit):
                    parts = boxes_of_range(box, low, min(low + limit, box.num_elements))
                    copies += [aligned_slices(origin[0], goal, part) for part in parts]
    actions = [_pairs(MoveKind.VIEW, 0, 0, -1, views)] if views else []
    batch: list[tuple[Slice, Slice]] = []
    filled = 0
    for pair in copies:
        if batch and filled + pair[0].num_elements > limit:
            actions.append(_pairs(MoveKind.COPY, 0, 0, -1, batch))
            batch, filled = [], 0
        batch.append(pair)
        filled += pair[0].num_elements
    return actions + ([_pairs(MoveKind.COPY, 0, 0, -1, batch)] if batch else [])


def _apart(holdings: list[Holding], box: Box) -> list[Holding]:
    """The first of each set of holdings that have this box in the same place."""
    if len(holdings) == 1:
        return holdings
    return list({holding.at(box): holding for holding in reversed(holdings)}.values())[::-1]


def _pairs(kind: MoveKind, seq: int, round: int, peer: int, pairs: Iterable[tuple[Slice, Slice]]) -> MoveAction:
    origin, goal = zip(*pairs, strict=True)
    return MoveAction(kind, seq, round, peer, origin, goal)


def _message(
    rows: dict[int, list[MoveAction]], source: Holdings, target: Holdings, cluster: Cluster, transfer: Transfer
) -> None:
    """Add both ends of a message, and the copies of what the receiver needs in a second place."""
    seq, at, sender, receiver = transfer.seq, transfer.round, transfer.sender, transfer.receiver
    outgoing: list[tuple[Holding, Box]] = []
    incoming: list[tuple[Holding, Box]] = []
    extra: list[tuple[Slice, Slice]] = []
    for number, box in transfer.chunk.pieces:
        # A rank that forwards what it received has it where the target wants it.
        origin = source.find(sender, number, box) or target.find(sender, number, box)
        first, *others = _apart(target.find(receiver, number, box), box)
        outgoing.append((origin[0], box))
        incoming.append((first, box))
        extra += [aligned_slices(first, other, box) for other in others]
    if cluster.is_store(sender) or cluster.is_store(receiver):
        pairs = [aligned_slices(origin, goal, box) for (origin, box), (goal, _) in zip(outgoing, incoming, strict=True)]
        if cluster.is_store(sender):
            assert not cluster.is_store(receiver), "stores run nothing: a store cannot copy to another"
            rows[receiver].append(_pairs(MoveKind.READ, seq, at, sender, pairs))
        else:
            rows[sender].append(_pairs(MoveKind.WRITE, seq, at, receiver, pairs))
    else:
        sent = tuple(holding.at(box) for holding, box in outgoing)
        received = tuple(holding.at(box) for holding, box in incoming)
        rows[sender].append(MoveAction(MoveKind.SEND, seq, at, receiver, sent, ()))
        rows[receiver].append(MoveAction(MoveKind.RECV, seq, at, sender, (), received))
    if extra:
        assert not cluster.is_store(receiver), "a store holds each element in one place"
        rows[receiver].append(_pairs(MoveKind.COPY, seq, at, -1, extra))

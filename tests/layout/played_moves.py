"""Executes the plan of a move on NumPy buffers: the mover without processes, and the judge of every plan.

Messages are blocking on both ends here, which is harder than what any transport does: a plan that passes cannot
deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plait.errors import RunError
from plait.layout.boxes import Slice
from plait.layout.holdings import Holdings
from plait.layout.move_cost import Bandwidths, Link, way_of
from plait.layout.move_plan import MoveAction, MoveKind, MovePlan

Array = NDArray[np.generic]
Memory = dict[int, dict[str, Array]]
"""rank → buffer → its elements"""

NUMPY_DTYPES = {"bfloat16": np.dtype(np.float16)}
"""NumPy has no bfloat16; another type of two bytes stands for it."""


@dataclass
class Traffic:
    """What a simulated move did, in bytes."""

    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    entered: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Node → bytes that came from other nodes."""
    buckets: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Rank → most bytes of one round's messages."""


def played_seconds(plan: MovePlan, bandwidths: Bandwidths) -> float:
    """How long the messages take in their order, and local copies before them: until every rank is done, if each ends
    a round before it begins its next."""
    copies = {rank: size / bandwidths.copy for rank, size in plan.traffic.copied.items()}
    until: dict[int, float] = defaultdict(float, copies)
    done, current = dict(until), dict[int, int]()
    free: dict[Link, float] = defaultdict(float)
    for number, sender, receiver, size in plan.messages:
        ranks = [end for end in (sender, receiver) if not plan.cluster.is_store(end)]
        for end in ranks:
            if current.get(end, -1) < number:
                current[end], done[end] = number, until[end]
        way = way_of(plan.cluster, sender, receiver, bandwidths)
        ended = max([done[end] for end in ranks] + [free[link] for link in way.links]) + way.latency + size / way.rate
        for link in way.links:
            free[link] = ended
        for end in ranks:
            until[end] = max(until[end], ended)
    return max(until.values(), default=0.0)


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    return NUMPY_DTYPES.get(name) or np.dtype(name)


def allocate(*holdings: Holdings) -> Memory:
    """Buffers of zeros; a name that several holdings have on a rank is one buffer."""
    memory: Memory = {}
    for held in holdings:
        for rank, sizes in held.buffers.items():
            for name, size in sizes.items():
                memory.setdefault(rank, {}).setdefault(name, np.zeros(size, numpy_dtype(held.dtype)))
    return memory


def view(buffer: Array, piece: Slice) -> Array:
    """The elements of a slice, in its shape, sharing memory with the buffer."""
    last = piece.offset + sum((extent - 1) * step for extent, step in zip(piece.shape, piece.strides, strict=True))
    assert 0 <= piece.offset <= last < buffer.size, f"{piece} lies outside a buffer of {buffer.size} elements"
    steps = tuple(stride * buffer.itemsize for stride in piece.strides)
    return np.lib.stride_tricks.as_strided(buffer[piece.offset :], piece.shape, steps)


def execute(plan: MovePlan, memory: Memory) -> Traffic:
    """Run every rank's row until all are done; buffers of the target are written in place.

    Raises:
        RunError: no rank can go on; names the actions that wait for one another.
    """
    traffic = Traffic()
    place = dict.fromkeys(plan.rows, 0)
    rounds: dict[tuple[int, int], int] = defaultdict(int)
    ready = sorted(plan.rows)
    while ready:
        rank = ready.pop()
        while (action := _next(plan, place, rank)) is not None:
            partner = None
            if action.kind in (MoveKind.SEND, MoveKind.RECV):
                partner = _next(plan, place, action.peer)
                if partner is None or not _meet(rank, action, partner):
                    break
                _pass_on(plan, memory, rank, action, partner)
            elif action.kind is not MoveKind.VIEW:
                _copy(plan, memory, rank, action)
            _count(plan, traffic, rounds, rank, action)
            place[rank] += 1
            if partner is not None:
                _count(plan, traffic, rounds, action.peer, partner)
                place[action.peer] += 1
                ready.append(action.peer)
    stuck = {rank: action for rank in plan.rows if (action := _next(plan, place, rank)) is not None}
    if stuck:
        waits = ", ".join(f"rank {rank} at {x.kind} {x.seq} with {x.peer}" for rank, x in sorted(stuck.items()))
        raise RunError(f"move: expected every message to meet its other end, found a deadlock: {waits}")
    for (rank, _), size in rounds.items():
        traffic.buckets[rank] = max(traffic.buckets[rank], size)
    return traffic


def _next(plan: MovePlan, place: Mapping[int, int], rank: int) -> MoveAction | None:
    row = plan.rows.get(rank, ())
    return row[place[rank]] if place.get(rank, 0) < len(row) else None


def _meet(rank: int, action: MoveAction, partner: MoveAction) -> bool:
    ends = {action.kind, partner.kind} == {MoveKind.SEND, MoveKind.RECV}
    return ends and partner.peer == rank and partner.seq == action.seq


def _pass_on(plan: MovePlan, memory: Memory, rank: int, action: MoveAction, partner: MoveAction) -> None:
    (sender, send), (receiver, receive) = (rank, action), (action.peer, partner)
    if action.kind is MoveKind.RECV:
        sender, send, receiver, receive = receiver, receive, sender, send
    parts = [view(memory[sender][piece.buffer], piece).ravel() for piece in send.source]
    message = np.concatenate(parts).astype(numpy_dtype(plan.wire_dtype))
    assert message.nbytes <= plan.bucket_bytes, f"message {send.seq} has {message.nbytes} bytes"
    start = 0
    for piece in receive.target:
        size = piece.num_elements
        view(memory[receiver][piece.buffer], piece)[...] = message[start : start + size].reshape(piece.shape)
        start += size
    assert start == message.size, f"message {send.seq}: {message.size} elements sent, {start} received"


def _copy(plan: MovePlan, memory: Memory, rank: int, action: MoveAction) -> None:
    origin = action.peer if action.kind is MoveKind.READ else rank
    goal = action.peer if action.kind is MoveKind.WRITE else rank
    for source, target in zip(action.source, action.target, strict=True):
        assert source.shape == target.shape, f"{source} is copied to {target}"
        taken = view(memory[origin][source.buffer], source).astype(numpy_dtype(plan.wire_dtype))
        view(memory[goal][target.buffer], target)[...] = taken


def _count(plan: MovePlan, traffic: Traffic, rounds: dict[tuple[int, int], int], rank: int, action: MoveAction) -> None:
    if action.peer < 0:
        return
    size = action.num_elements * plan.item_bytes
    rounds[rank, action.round] += size
    origin, goal = plan.cluster.node_of(action.peer), plan.cluster.node_of(rank)
    if action.kind in (MoveKind.SEND, MoveKind.WRITE):
        traffic.sent[rank] += size
        if action.kind is MoveKind.WRITE:
            traffic.received[action.peer] += size
        return
    traffic.received[rank] += size
    if origin != goal:
        traffic.entered[goal] += size
    if action.kind is MoveKind.READ:
        traffic.sent[action.peer] += size

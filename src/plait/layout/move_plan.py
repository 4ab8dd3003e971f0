"""The plan of a move, as a value: what each rank sends, receives and copies, in order, with the places of all bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from plait.layout.boxes import Slice
from plait.layout.holdings import ITEM_BYTES
from plait.layout.mesh import Cluster


class MoveKind(StrEnum):
    """What an action of a move does on its rank."""

    VIEW = "VIEW"
    """Nothing: the elements lie where the target wants them."""
    COPY = "COPY"
    SEND = "SEND"
    RECV = "RECV"
    READ = "READ"
    """From a store (a file), by the rank that needs it."""
    WRITE = "WRITE"
    """To a store, by a rank that holds it."""


@dataclass(frozen=True, slots=True)
class MoveAction:
    """One step of one rank.

    seq:    number of the message, the same on both ends; a local action has that of the next message in its row
    round:  a rank sends at most one message and receives at most one per round
    peer:   the other rank or store; -1 for a local action
    source: where the elements are read: on this rank; in the store for READ; empty for RECV
    target: where they are written: on this rank; in the store for WRITE; empty for SEND

    A message is its slices one after another, each row-major, in the wire dtype. Where there are both, source[i] and
    target[i] have the same shape.
    """

    kind: MoveKind
    seq: int
    round: int
    peer: int
    source: tuple[Slice, ...]
    target: tuple[Slice, ...]

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for piece in self.source or self.target)


class Message(NamedTuple):
    """What goes from a rank or store to another in one piece; rounds as of `MoveAction`."""

    round: int
    sender: int
    receiver: int
    num_bytes: int


class Carried(NamedTuple):
    """All that goes from a rank or store to another: how many messages, and their bytes."""

    num_messages: int
    num_bytes: int


@dataclass(frozen=True)
class Traffic:
    """How much a move sends over each link and copies locally, without its order and places.

    carried: (sender, receiver) → messages and bytes; either end may be a store
    copied:  rank → bytes that its local copies write, in the target dtype; ranks that write none may be left out
    """

    cluster: Cluster
    carried: Mapping[tuple[int, int], Carried]
    copied: Mapping[int, int]

    @cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """(sender, receiver) → bytes of all messages between them."""
        return {ends: num_bytes for ends, (_, num_bytes) in self.carried.items()}

    @property
    def total_bytes(self) -> int:
        return sum(self.link_bytes.values())

    def received_bytes(self, rank: int) -> int:
        return self._end_bytes[1].get(rank, 0)

    def sent_bytes(self, rank: int) -> int:
        return self._end_bytes[0].get(rank, 0)

    @cached_property
    def _end_bytes(self) -> tuple[dict[int, int], dict[int, int]]:
        """Rank → bytes that it sends; rank → bytes that it receives."""
        sent: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        for (sender, receiver), size in self.link_bytes.items():
            sent[sender] += size
            received[receiver] += size
        return sent, received

    @cached_property
    def node_bytes(self) -> dict[int, tuple[int, int]]:
        """Node → bytes that leave it and bytes that enter it."""
        totals: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for (sender, receiver), size in self.link_bytes.items():
            origin, goal = self.cluster.node_of(sender), self.cluster.node_of(receiver)
            if origin != goal:
                totals[origin][0] += size
                totals[goal][1] += size
        return {node: (out, into) for node, (out, into) in totals.items()}

    @property
    def num_messages(self) -> int:
        return sum(count for count, _ in self.carried.values())


@dataclass(frozen=True)
class MovePlan:
    """A move of one list of parameters.

    rows:         rank → its actions, in order; a store has none
    wire_dtype:   of messages; the narrower of the two dtypes
    bucket_bytes: no message is longer
    """

    cluster: Cluster
    rows: Mapping[int, tuple[MoveAction, ...]]
    source_dtype: str
    target_dtype: str
    wire_dtype: str
    bucket_bytes: int

    @property
    def item_bytes(self) -> int:
        """Bytes of an element on the wire."""
        return ITEM_BYTES[self.wire_dtype]

    def __iter__(self) -> Iterator[tuple[int, MoveAction]]:
        return ((rank, action) for rank in sorted(self.rows) for action in self.rows[rank])

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All of them, in their order."""
        found: dict[int, Message] = {}
        for rank, action in self:
            size = action.num_elements * self.item_bytes
            match action.kind:
                case MoveKind.SEND | MoveKind.WRITE:
                    found[action.seq] = Message(action.round, rank, action.peer, size)
                case MoveKind.READ:
                    found[action.seq] = Message(action.round, action.peer, rank, size)
        return tuple(found[seq] for seq in sorted(found))

    @property
    def num_rounds(self) -> int:
        return 1 + max((message.round for message in self.messages), default=-1)

    @cached_property
    def traffic(self) -> Traffic:
        """What it carries, without the order and the places."""
        sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for message in self.messages:
            sizes[message.sender, message.receiver].append(message.num_bytes)
        carried = {ends: Carried(len(of_ends), sum(of_ends)) for ends, of_ends in sizes.items()}
        size = ITEM_BYTES[self.target_dtype]
        copies = {rank: [x for x in row if x.kind == MoveKind.COPY] for rank, row in self.rows.items()}
        copied = {rank: sum(x.num_elements for x in local) * size for rank, local in copies.items() if local}
        return Traffic(self.cluster, carried, copied)

"""Executes pipeline schedules: this rank's row of one, an action per `next()`, with its messages.

Any schedule that `schedule.validate` lets pass runs, of one model or of several on the same ranks: receives are posted
ahead, messages find each other by tag, and a rank waits only for the message that its next action needs. Sends are not
waited for until the backward of their micro-batch has come, or the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol
from zlib import crc32

from torch import Tensor

from plait.errors import DataError
from plait.models.parallel.peers import FIRST_INNER_TAG, Peers
from plait.models.parallel.transfer import Transfer
from plait.policy.packing import MicroBatch
from plait.schedule.action import Action, Kind
from plait.schedule.pipeline import Pipeline, Workload
from plait.schedule.schedule import Schedule, natural_waits, with_transfers
from plait.schedule.work import Done, Work

RECEIVES_AHEAD = 4
"""Receives that are posted before the action that needs them."""

MOST_SENDS = 8
"""On their way at once where no backward says that they have come."""

CALL_TAGS = 1 << 12
"""Tags in a row; those of calls that run at the same time are kept apart by a hash of their names. A call with more
messages between two ranks has several such rows."""

_TRANSFERS = {Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD}


class Stage(Protocol):
    """What one model does on this rank: its stage of one pipeline, for the micro-batches of one call."""

    def forward(self, index: int, inputs: Tensor | None) -> Tensor | None:
        """Micro-batch `index`, from what the stage before made of it.

        Args:
            inputs: hidden states [T, H] of its T packed tokens, in the compute dtype, or any other message that has a
                `room`; None: this is the first stage.

        Returns:
            The like, for the next stage; None on the last.
        """
        ...

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """The backward of micro-batch `index`.

        Args:
            gradient: of what `forward` returned, in its shape; None: this is the last stage.

        Returns:
            The gradient of the inputs, in their shape; None on the first.
        """
        ...

    def room(self, index: int) -> Tensor:
        """Memory for one message of a micro-batch, in either direction, in the compute dtype: [T, H], or what takes the
        place of hidden states."""
        ...

    def tokens(self, index: int) -> int:
        """Packed tokens of a micro-batch."""
        ...


def pipeline_of(model: str, copy: int, ranks: Sequence[int], micros: Sequence[MicroBatch]) -> Pipeline:
    """What a pipeline schedule is made for: ragged micro-batches whose time and memory go with their tokens.

    Args:
        ranks: where the stages are, in order.
    """
    tokens = tuple(float(max(1, micro.num_tokens)) for micro in micros)
    table = (tokens,) * len(ranks)
    backward = (tuple(2 * number for number in tokens),) * len(ranks)
    return Pipeline(model, copy, tuple(ranks), table, backward, table)


def forwards_only(workload: Workload) -> Schedule:
    """Every stage computes micro-batch after micro-batch."""
    rows: list[list[Action]] = [[] for _ in range(workload.num_ranks)]
    for pipeline in workload.pipelines:
        for stage, rank in enumerate(pipeline.ranks):
            rows[rank] += [pipeline.action(Kind.FORWARD, stage, i) for i in range(pipeline.num_microbatches)]
    return Schedule(tuple(tuple(row) for row in rows), "forwards only")


def execute(
    schedule: Schedule,
    stages: Mapping[tuple[str, int], Stage],
    peers: Peers,
    *,
    name: str,
    names: Mapping[str, Sequence[str]] | None = None,
    in_order: bool = False,
) -> Work[None]:
    """Run the row of this rank, an action per `next()`.

    Args:
        schedule: valid; rank i of it is the rank with index i of `peers`. A message is sent as soon as it is made and
            waited for where it is used, wherever the schedule lists its send and its receive.
        stages: (model, copy) → its stage here, for each of which the row has actions.
        name: of the call, in front of the action ids. Calls that run at the same time over the same peers differ in it.
        names: model → what stands in front of the ids of its actions, by micro-batch, where it is not `name`.
        in_order: messages between two ranks meet in the order of posting, not by tag (NCCL): both ends post them in one
            order, that of an execution.

    Raises:
        DataError: the schedule has an action that is none of a pipeline, or one that waits for another rank without a
            message.
        RunError: a peer is gone or late.
    """
    _check(schedule)
    return _Row(with_transfers(_computed(schedule)), stages, peers, name, names or {}, in_order).run()


class _Row:
    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[tuple[str, int], Stage],
        peers: Peers,
        name: str,
        names: Mapping[str, Sequence[str]],
        in_order: bool,
    ) -> None:
        self._row = schedule.rows[peers.index]
        self._stages = stages
        self._peers = peers
        self._name, self._names = name, names
        self._routes = _routes(schedule, name)
        receives = [action for action in self._row if action.kind.lane == "recv"]
        self._lines = message_lines(schedule, peers.index) if in_order else {-1: deque(receives)}
        """Peer → messages with it in the order in which they are posted; by tag: one line of receives alone."""
        self._in_order = in_order
        self._posted: dict[str, Transfer] = {}
        """Receives that nobody has waited for."""
        self._made: dict[str, Tensor] = {}
        """Action id → what it made or received, until it is used."""
        self._sends: dict[str, Transfer] = {}
        self._has_backward = any(action.kind is Kind.BACKWARD for action in self._row)

    def run(self) -> Work[None]:
        for action in self._row:
            self._post_ahead()
            match action.kind:
                case Kind.FORWARD | Kind.BACKWARD:
                    self._compute(action)
                    moved, tokens = 0, self._stage(action).tokens(_index(action))
                case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                    moved, tokens = self._send(action), 0
                case _:
                    moved, tokens = self._receive(action), 0
            names = self._names.get(action.model)
            title = f"{self._name if names is None else names[_index(action)]}/{action.id}"
            yield Done(title, action.kind.value, tokens, moved, action.kind.lane, action.model)
        for transfer in self._sends.values():
            transfer.wait()

    def _stage(self, action: Action) -> Stage:
        return self._stages[action.model, action.copy]

    def _post_ahead(self) -> None:
        for line in self._lines.values():
            while line and line[0].kind.lane == "recv" and len(self._posted) < RECEIVES_AHEAD:
                self._post(line.popleft())

    def _post(self, action: Action) -> None:
        assert action.kind.lane == "recv", f"{action.id} is not made, and a message behind it is needed"
        peer, tag = self._routes[action.id]
        room = self._stage(action).room(_index(action))
        self._posted[action.id] = self._peers.irecv(room, peer, tag, action.id)

    def _receive(self, action: Action) -> int:
        line = self._lines[self._routes[action.id][0] if self._in_order else -1]
        while action.id not in self._posted:
            self._post(line.popleft())
        tensor = self._made[action.id] = self._posted.pop(action.id).wait()
        self._post_ahead()
        return tensor.numel() * tensor.itemsize

    def _send(self, action: Action) -> int:
        peer, tag = self._routes[action.id]
        if self._in_order:
            while (ahead := self._lines[peer].popleft()) is not action:
                self._post(ahead)
        tensor = self._made.pop(action.waits[0])
        self._sends[action.id] = self._peers.isend(tensor, peer, tag, action.id)
        if not self._has_backward and len(self._sends) > MOST_SENDS:
            self._sends.pop(next(iter(self._sends))).wait()
        return tensor.numel() * tensor.itemsize

    def _compute(self, action: Action) -> None:
        index, stage = _index(action), self._stage(action)
        received = next((self._made.pop(wait) for wait in action.waits if wait in self._made), None)
        if action.kind is Kind.FORWARD:
            made = stage.forward(index, received)
        else:
            made = stage.backward(index, received)
            sent = _same(action, Kind.SEND_FORWARD)
            if sent in self._sends:  # its gradient has come, so it has
                self._sends.pop(sent).wait()
        if made is not None:
            self._made[action.id] = made


def _check(schedule: Schedule) -> None:
    rank_of = {action.id: action.rank for action in schedule}
    known = set(rank_of)
    for action in schedule:
        if action.kind not in {Kind.FORWARD, Kind.BACKWARD, *_TRANSFERS} or action.index is None:
            raise DataError(f"{action.id} on rank {action.rank}: expected forwards and backwards of micro-batches")
        carried = natural_waits(action, known)
        for wait in action.waits:
            if rank_of.get(wait) != action.rank and wait not in carried:
                raise DataError(f"{action.id} on rank {action.rank} waits for {wait}, but no message tells it of that")


def _computed(schedule: Schedule) -> Schedule:
    """Without sends and receives: what waited for one waits for what made the message."""
    actions = {action.id: action for action in schedule}

    def origin(wait: str) -> str:
        while actions[wait].kind in _TRANSFERS:
            wait = actions[wait].waits[0]
        return wait

    rows = [
        tuple(replace(step, waits=tuple(map(origin, step.waits))) for step in row if step.kind not in _TRANSFERS)
        for row in schedule.rows
    ]
    return replace(schedule, rows=tuple(rows))


def message_lines(schedule: Schedule, rank: int) -> dict[int, deque[Action]]:
    """Peer → the sends and receives of this rank with it, in the order of an execution in which ranks take turns.

    Both ends have the same order. It can be posted: what a send waits for is ahead of it, and so is what made it.
    """
    receive_of = {action.waits[0]: action for action in schedule if action.kind.lane == "recv"}
    lines: dict[int, deque[Action]] = {}
    done: set[str] = set()
    at = [0] * schedule.num_ranks
    while any(place < len(row) for place, row in zip(at, schedule.rows, strict=True)):
        ready = [
            row[place]
            for place, row in zip(at, schedule.rows, strict=True)
            if place < len(row) and done.issuperset(row[place].waits)
        ]
        assert ready, "a valid schedule does not stand still"
        for action in ready:
            at[action.rank] += 1
            done.add(action.id)
            if action.kind.lane == "send":
                receive = receive_of[action.id]
                if action.rank == rank:
                    lines.setdefault(receive.rank, deque()).append(action)
                elif receive.rank == rank:
                    lines.setdefault(action.rank, deque()).append(receive)
    return lines


def _routes(schedule: Schedule, name: str) -> dict[str, tuple[int, int]]:
    """Id of a send or receive → (the other rank, the tag). Messages between two ranks have tags of their own."""
    rank_of = {action.id: action.rank for action in schedule}
    counts: dict[tuple[int, int], int] = {}
    routes: dict[str, tuple[int, int]] = {}
    for action in schedule:
        if action.kind.lane == "recv":
            sender, receiver = rank_of[action.waits[0]], action.rank
            number = counts[sender, receiver] = counts.get((sender, receiver), -1) + 1
            tag = _tag(name, number)
            routes[action.id] = sender, tag
            routes[action.waits[0]] = receiver, tag
    return routes


def _tag(name: str, number: int) -> int:
    row, place = divmod(number, CALL_TAGS)
    key = f"{name} {row}" if row else name
    return crc32(key.encode()) % (FIRST_INNER_TAG // CALL_TAGS) * CALL_TAGS + place


def _index(action: Action) -> int:
    assert action.index is not None, f"{action.id} names no micro-batch"
    return action.index


def _same(action: Action, kind: Kind) -> str:
    return Action(kind, action.model, action.copy, action.stage, action.index).id

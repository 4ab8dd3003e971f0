"""Executes pipeline schedules: this rank's row of one, an action per `next()`, with its messages.

Any schedule that `schedule.validate` lets pass runs, of one model or of several on the same ranks: receives are posted
ahead, messages find each other by tag, and a rank waits only for the message that its next action needs. Sends are not
waited for until the backward of their micro-batch has come, or the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Protocol
from zlib import crc32

from torch import Tensor

from plait.errors import DataError
from plait.models.team import FIRST_INNER_TAG, Peers, Transfer
from plait.policy.packing import MicroBatch
from plait.schedule.action import Action, Kind
from plait.schedule.pipeline import Pipeline, Workload
from plait.schedule.schedule import Schedule, natural_waits, with_transfers
from plait.training.results import Done

RECEIVES_AHEAD = 4
"""Receives that are posted before the action that needs them."""

MOST_SENDS = 8
"""On their way at once where no backward says that they have come."""

CALL_TAGS = 1 << 12
"""Tags of one call; those of calls that run at the same time are kept apart by a hash of their names."""

_TRANSFERS = {Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD}


class Stage(Protocol):
    """What one model does on this rank: its stage of one pipeline, for the micro-batches of one call."""

    def forward(self, index: int, inputs: Tensor | None) -> Tensor | None:
        """Micro-batch `index`, from what the stage before made of it; None: this is the first.

        Returns:
            What the next stage needs; None on the last.
        """
        ...

    def backward(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """The backward, from the gradient of what `forward` returned; None: this is the last.

        Returns:
            The gradient of the inputs; None on the first.
        """
        ...

    def room(self, index: int) -> Tensor:
        """Memory for one message of a micro-batch, in either direction."""
        ...

    def tokens(self, index: int) -> int:
        """Packed tokens of a micro-batch."""
        ...


def workload_of(model: str, copy: int, num_stages: int, micros: Sequence[MicroBatch]) -> Workload:
    """What a pipeline schedule is made for: ragged micro-batches whose time and memory go with their tokens."""
    tokens = tuple(float(max(1, micro.num_tokens)) for micro in micros)
    table = (tokens,) * num_stages
    backward = (tuple(2 * number for number in tokens),) * num_stages
    return Workload((Pipeline(model, copy, tuple(range(num_stages)), table, backward, table),), num_stages)


def forwards_only(workload: Workload) -> Schedule:
    """Every stage computes micro-batch after micro-batch."""
    rows: list[list[Action]] = [[] for _ in range(workload.num_ranks)]
    for pipeline in workload.pipelines:
        for stage, rank in enumerate(pipeline.ranks):
            rows[rank] += [pipeline.action(Kind.FORWARD, stage, i) for i in range(pipeline.num_microbatches)]
    return Schedule(tuple(tuple(row) for row in rows), "forwards only")


def execute(
    schedule: Schedule, stages: Mapping[tuple[str, int], Stage], peers: Peers, *, name: str
) -> Generator[Done, None, None]:
    """Run the row of this rank, an action per `next()`.

    Args:
        schedule: valid; rank i of it is the rank with index i of `peers`. Sends and receives are added where it has
            none.
        stages: (model, copy) → its stage here, for each of which the row has actions.
        name: of the call, in front of the action ids. Calls that run at the same time over the same peers differ in it.

    Raises:
        DataError: the schedule has an action that is none of a pipeline, or one that waits for another rank without a
            message.
        RunError: a peer is gone or late.
    """
    _check(schedule)
    return _Row(with_transfers(schedule), stages, peers, name).run()


class _Row:
    def __init__(self, schedule: Schedule, stages: Mapping[tuple[str, int], Stage], peers: Peers, name: str) -> None:
        self._row = schedule.rows[peers.index]
        self._stages = stages
        self._peers = peers
        self._name = name
        self._routes = _routes(schedule, name)
        self._receives: Iterator[Action] = iter([action for action in self._row if action.kind.lane == "recv"])
        self._posted: deque[tuple[Action, Transfer]] = deque()
        self._made: dict[str, Tensor] = {}
        """Action id → what it made or received, until it is used."""
        self._sends: dict[str, Transfer] = {}
        self._has_backward = any(action.kind is Kind.BACKWARD for action in self._row)

    def run(self) -> Generator[Done, None, None]:
        for action in self._row:
            self._post()
            match action.kind:
                case Kind.FORWARD | Kind.BACKWARD:
                    self._compute(action)
                    moved, tokens = 0, self._stage(action).tokens(_index(action))
                case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                    moved, tokens = self._send(action), 0
                case _:
                    moved, tokens = self._receive(action), 0
            yield Done(f"{self._name}/{action.id}", action.kind.value, tokens, moved)
        for transfer in self._sends.values():
            transfer.wait()

    def _stage(self, action: Action) -> Stage:
        return self._stages[action.model, action.copy]

    def _post(self) -> None:
        while len(self._posted) < RECEIVES_AHEAD and (action := next(self._receives, None)) is not None:
            peer, tag = self._routes[action.id]
            room = self._stage(action).room(_index(action))
            self._posted.append((action, self._peers.irecv(room, peer, tag, action.id)))

    def _receive(self, action: Action) -> int:
        posted, transfer = self._posted.popleft()
        assert posted is action, f"{action.id} is waited for where {posted.id} was posted first"
        tensor = self._made[action.id] = transfer.wait()
        self._post()
        return tensor.numel() * tensor.itemsize

    def _send(self, action: Action) -> int:
        peer, tag = self._routes[action.id]
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
    for action in schedule:
        if action.kind not in {Kind.FORWARD, Kind.BACKWARD, *_TRANSFERS} or action.index is None:
            raise DataError(f"{action.id} on rank {action.rank}: expected forwards and backwards of micro-batches")
        carried = natural_waits(action, set(rank_of))
        for wait in action.waits:
            if rank_of.get(wait) != action.rank and wait not in carried:
                raise DataError(f"{action.id} on rank {action.rank} waits for {wait}, of which no message tells it")


def _routes(schedule: Schedule, name: str) -> dict[str, tuple[int, int]]:
    """Id of a send or receive → (the other rank, the tag). Messages between two ranks have tags of their own."""
    first = crc32(name.encode()) % (FIRST_INNER_TAG // CALL_TAGS) * CALL_TAGS
    rank_of = {action.id: action.rank for action in schedule}
    counts: dict[tuple[int, int], int] = {}
    routes: dict[str, tuple[int, int]] = {}
    for action in schedule:
        if action.kind.lane == "recv":
            sender, receiver = rank_of[action.waits[0]], action.rank
            number = counts[sender, receiver] = counts.get((sender, receiver), -1) + 1
            assert number < CALL_TAGS, f"more than {CALL_TAGS} messages from rank {sender} to {receiver} in one call"
            routes[action.id] = sender, first + number
            routes[action.waits[0]] = receiver, first + number
    return routes


def _index(action: Action) -> int:
    assert action.index is not None, f"{action.id} names no micro-batch"
    return action.index


def _same(action: Action, kind: Kind) -> str:
    return Action(kind, action.model, action.copy, action.stage, action.index).id

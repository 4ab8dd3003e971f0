"""Executes the plan of a move on one rank: local copies, messages, files.

Round by round, as planned: a rank sends at most one message of a round and receives at most one. A message that is one
contiguous stretch of a buffer in the dtype of the wire goes straight from there, or comes straight to it; all others
pass through staging memory, one bucket for each direction. Messages of later rounds are posted as far ahead as their
staging fits: receives, and sends of what was there before the move.

There is no deadlock. Consider the earliest round with a message that is not through. Both of its ranks have finished
all earlier rounds. In a round, a rank waits only for messages of that round and of earlier ones, and for those of that
round only after it has posted all of its own. So both ends of the message are posted, and it gets through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from plait.layout.boxes import Slice
from plait.layout.move_plan import MoveAction, MoveKind, MovePlan
from plait.reallocation.communicator import Channel, Communicator, Message
from plait.reallocation.memory import DTYPES, Staging, gather, paired_runs, part, runs, scatter
from plait.reallocation.stores import StoreFile, StoreReader, StoreWriter
from plait.schedule.work import DISK, LINK, Done, Work

AHEAD = 4
"""Most messages of each direction that are on their way at once."""


@dataclass(frozen=True)
class MoveReport:
    """Bytes that a move has sent from one rank to each rank or store, and brought from each, as counted where they
    passed: `Traffic.link_bytes` of the links of this rank."""

    sent: Mapping[int, int]
    received: Mapping[int, int]


def moving(
    plan: MovePlan,
    rank: int,
    buffers: Mapping[str, Tensor],
    channel: Channel | None = None,
    *,
    files: Mapping[int, StoreFile] | None = None,
    name: str = "move",
) -> Work[MoveReport]:
    """Do the part of a rank, an action per `next()`; all ranks of the plan do theirs at the same time.

    The buffers of the source must stay as they are until the end. A rank waits for its peers inside `next()`, so moves
    that take turns must do so round by round (`MoveAction.round`), in an order that all ranks share: else two ranks
    could wait for each other. A move that is given up on the way leaves the group unusable, and of files only those
    that it had finished.

    Args:
        buffers: of this rank, source and target, by name: flat [elements], contiguous, on any device.
        channel: for messages; None: the default group.
        files: store → file, for those that this rank reads or writes; its records are of the disk's lane then.
        name: of the move, for records and errors.

    Raises:
        RunError: a message did not come or go until its deadline, a peer is gone, or a file could not be written; says
            which action, which peer and how many bytes.
        DataError: a file is damaged or not the one that was planned with.
    """
    device = next(iter(buffers.values())).device if buffers else torch.device("cpu")
    link = Communicator(channel or Channel(), rank, device, name)
    lane = LINK if files is None else DISK
    run = _Run(plan, rank, buffers, link, files or {}, name)
    try:
        for _, actions in groupby(enumerate(plan.rows.get(rank, ())), key=lambda item: item[1].round):
            row = list(actions)
            run.begin([action for _, action in row])
            for index, action in row:
                run.do(action)
                num_bytes = 0 if action.kind is MoveKind.VIEW else action.num_elements * plan.item_bytes
                yield Done(f"{name}/{index}", action.kind.name, bytes=num_bytes, lane=lane, units=0)
        run.finish()
        return run.report()
    finally:
        run.writer.discard()


class _Run:
    """One move on one rank, on its way."""

    def __init__(
        self,
        plan: MovePlan,
        rank: int,
        buffers: Mapping[str, Tensor],
        link: Communicator,
        files: Mapping[int, StoreFile],
        name: str,
    ) -> None:
        self.plan, self.buffers, self.link = plan, buffers, link
        row = plan.rows.get(rank, ())
        _check(plan, row, buffers)
        self.wire = DTYPES[plan.wire_dtype]
        limit = plan.bucket_bytes // plan.item_bytes
        self.inbox, self.outbox = (Staging(limit, self.wire, self.link.device) for _ in range(2))
        self.coming: deque[Message] = deque()
        """Receives that are posted, in the plan's order."""
        self.later = deque(action for action in row if action.kind is MoveKind.RECV)
        """Receives that are not."""
        self.going: deque[Message] = deque()
        """Sends that are posted."""
        self.unsent = deque(action for action in row if action.kind is MoveKind.SEND)
        """Sends that are not."""
        self.written = {piece.buffer for action in row if action.kind is not MoveKind.WRITE for piece in action.target}
        self.reader = StoreReader(files, plan.source_dtype)
        self.writer = StoreWriter(files, plan, rank, name)
        self.files: dict[MoveKind, dict[int, int]] = {MoveKind.READ: {}, MoveKind.WRITE: {}}

    def begin(self, actions: Sequence[MoveAction]) -> None:
        """Post the messages of a round, and what can be of later ones."""
        messages = []
        for action in actions:
            if action.kind is MoveKind.RECV and self.later and self.later[0] is action:
                message = self._incoming()
                assert message is not None, f"no room for message {action.seq}, though all earlier ones are through"
                messages.append(message)
        if self.link.in_any_order:
            # The peer may send while this rank still gathers.
            self.link.post(messages)
            messages = []
        for action in actions:
            if action.kind is MoveKind.SEND and self.unsent and self.unsent[0] is action:
                message = self._outgoing(action.round)
                assert message is not None, f"no room for message {action.seq}, though all earlier ones are through"
                messages.append(message)
        self.link.post(messages)
        if self.link.in_any_order:
            self._go_ahead(actions[0].round)

    def _go_ahead(self, round: int) -> None:
        """Post messages of later rounds: receives while there is room, sends of what was here before the move."""
        while self.later and len(self.coming) < AHEAD and (message := self._incoming()):
            self.link.post([message])
        while self.unsent and not any(piece.buffer in self.written for piece in self.unsent[0].source):
            if (message := self._outgoing(round)) is None:
                break
            self.link.post([message])

    def do(self, action: MoveAction) -> None:
        """Do one action; a SEND was posted with its round."""
        match action.kind:
            case MoveKind.COPY:
                for source, target in paired_runs(action.source, action.target):
                    part(self.buffers[target.buffer], target).copy_(part(self.buffers[source.buffer], source))
            case MoveKind.RECV:
                message = self.coming.popleft()
                assert message.action is action, "receives are waited for in the order in which they were posted"
                self.link.wait(message)
                if message.staged:
                    scatter(message.tensor, self.buffers, runs(action.target))
                    self.inbox.give_back(message.tensor)
                else:
                    increment_version(message.tensor)  # a message does not, and engines go by it
            case MoveKind.READ:
                for source, target in paired_runs(action.source, action.target):
                    stored = self.reader.buffer(action.peer, source.buffer)
                    part(self.buffers[target.buffer], target).copy_(part(stored, source))
                self._count_file(action)
            case MoveKind.WRITE:
                for source, target in paired_runs(action.source, action.target):
                    self.writer.write(action.peer, part(self.buffers[source.buffer], source), target)
                self.writer.done(action)
                self._count_file(action)

    def finish(self) -> None:
        """Until all that was sent is through."""
        while self.going:
            self._sent()
        assert not self.coming, "a receive was posted and not waited for"
        assert not self.later, "a receive was never posted"

    def report(self) -> MoveReport:
        return MoveReport(
            {**self.link.sent_bytes, **self.files[MoveKind.WRITE]},
            {**self.link.received_bytes, **self.files[MoveKind.READ]},
        )

    def _incoming(self) -> Message | None:
        """The next receive; None where there is no room for it yet."""
        action = self.later[0]
        tensor = self._straight(action.target)
        staged = tensor is None
        if tensor is None:
            tensor = self.inbox.take(action.num_elements)
        if tensor is None:
            return None
        self.later.popleft()
        self.coming.append(Message(action, tensor, staged))
        return self.coming[-1]

    def _outgoing(self, round: int) -> Message | None:
        """The next send; None where there is no room for it before sends of this round are through."""
        action = self.unsent[0]
        tensor = self._straight(action.source)
        staged = tensor is None
        while len(self.going) >= AHEAD or (staged and (tensor := self.outbox.take(action.num_elements)) is None):
            if not self.going or self.going[0].action.round >= round:
                return None
            self._sent()
        assert tensor is not None, "a message without memory"
        if staged:
            gather(self.buffers, runs(action.source), tensor)
        self.unsent.popleft()
        self.going.append(Message(action, tensor, staged))
        return self.going[-1]

    def _sent(self) -> None:
        message = self.going.popleft()
        self.link.wait(message)
        if message.staged:
            self.outbox.give_back(message.tensor)

    def _straight(self, pieces: Sequence[Slice]) -> Tensor | None:
        """The elements of a message where they lie, if that is one stretch of memory which the wire takes as it is."""
        first, *others = runs(pieces)
        buffer = self.buffers[first.buffer]
        if others or first.strides != (1,) or buffer.dtype != self.wire or buffer.device != self.link.device:
            return None
        return part(buffer, first)

    def _count_file(self, action: MoveAction) -> None:
        counted = self.files[action.kind]
        counted[action.peer] = counted.get(action.peer, 0) + action.num_elements * self.plan.item_bytes


def _check(plan: MovePlan, row: Sequence[MoveAction], buffers: Mapping[str, Tensor]) -> None:
    """Every buffer that the row names is there, flat, and in its dtype."""
    names: dict[str, set[str]] = {}
    for action in row:
        if action.kind is not MoveKind.READ:
            for piece in action.source:
                # What is forwarded, or copied to a second place, lies in a buffer of the target.
                names.setdefault(piece.buffer, {plan.source_dtype, plan.target_dtype})
    for action in row:
        if action.kind is not MoveKind.WRITE:
            names |= {piece.buffer: {plan.target_dtype} for piece in action.target}
    for name, dtypes in names.items():
        assert name in buffers, f"the plan moves buffer {name}, found {', '.join(buffers) or 'none'}"
        buffer = buffers[name]
        flat = buffer.dim() == 1 and buffer.is_contiguous()
        assert flat, f"buffer {name} is not flat: {tuple(buffer.shape)}"
        assert buffer.dtype in {DTYPES[dtype] for dtype in dtypes}, f"buffer {name} is {buffer.dtype}, not {dtypes}"

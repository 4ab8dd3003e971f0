"""The messages of one move: posted to a process group, counted, and waited for until a deadline.

One communicator and one thread: on gloo messages find each other by tag, so receives are posted long before their
data; on NCCL they meet in the order of posting, so both messages of a round are posted as one batch, and the group
has to be connected before (`models.parallel.nccl`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import RunError, why_not_through
from plait.layout.move_plan import MoveAction, MoveKind
from plait.models.parallel import nccl
from plait.models.parallel.transfer import WaitingFor


@dataclass(eq=False)
class Message:
    """One end of a message that is under way. `tensor` [elements] is what is sent, or what the message is received
    into; nothing else may change it before the message is through."""

    action: MoveAction
    tensor: Tensor
    staged: bool
    """`tensor` is staging memory, not a part of a buffer."""
    work: dist.Work | None = None

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.itemsize

    @property
    def is_sent(self) -> bool:
        return self.action.kind is MoveKind.SEND


DEADLINE_S = 30.0


@dataclass(frozen=True)
class Channel:
    """What the messages of a move go through."""

    group: dist.ProcessGroup | None = None
    """A group of torch.distributed; ranks of the plan are global ranks. None: the default group."""
    deadline_s: float = DEADLINE_S
    """How long each wait for a peer may take."""
    first_tag: int = 0
    """Message number `seq` has the tag `first_tag + seq`. Moves that run at once over one group need ranges of tags
    that do not meet; a move has as many tags as messages (`Traffic.num_messages`)."""
    waiting_for: WaitingFor = field(default=lambda what: nullcontext(), repr=False)
    """Told what each wait is for, as long as it lasts."""

    def __post_init__(self) -> None:
        assert self.deadline_s > 0, f"a deadline of {self.deadline_s} s lets nothing through"


class Communicator:
    """Messages of rank `rank` over a channel. Peers are global ranks of torch.distributed.

    Args:
        device: of the buffers; decides which backend of the group carries them.
        name: of the move, for errors.
    """

    def __init__(self, channel: Channel, rank: int, device: torch.device, name: str) -> None:
        self._group = group = channel.group
        self._rank = rank
        self._deadline_s = channel.deadline_s
        self._first_tag = channel.first_tag
        self._name = name
        self._waiting_for = channel.waiting_for
        by_nccl = nccl.carries(group, device)
        self.device = device if by_nccl else torch.device("cpu")
        """The device that tensors of messages must be on."""
        self.in_any_order = not by_nccl
        """Whether a receive may be posted before messages that come earlier."""
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self.received_bytes: dict[int, int] = defaultdict(int)

    def post(self, messages: Sequence[Message]) -> None:
        """Begin to send or receive all of these, as one batch.

        Raises:
            RunError: the group is broken.
        """
        if not messages:
            return
        assert dist.is_initialized(), f"{self._name}: rank {self._rank} has messages, and no process group"
        operations = [
            dist.P2POp(
                dist.isend if message.is_sent else dist.irecv,
                message.tensor,
                message.action.peer,
                self._group,
                self._first_tag + message.action.seq,
            )
            for message in messages
        ]
        try:
            with nccl.posting(self._group):
                works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self._failure(messages[0], error) from error
        # Backends that coalesce give one work for all.
        for message, work in zip(
            messages, works if len(works) == len(messages) else works * len(messages), strict=True
        ):
            message.work = work

    def wait(self, message: Message) -> None:
        """Wait until a message is through, so that its tensor is free or filled, and count its bytes.

        Raises:
            RunError: it is not through at the deadline, or has failed. The group cannot be used after that.
        """
        assert message.work is not None, "waits for a message that was never posted"
        action, whom = message.action, f"rank {message.action.peer}"
        try:
            with self._waiting_for(f"{whom} ({self._name}: {action.kind} {action.seq}, {message.num_bytes} bytes)"):
                through = nccl.wait(message.work, message.tensor, self._deadline_s)
        except RuntimeError as error:
            raise self._failure(message, error) from error
        if not through:
            raise self._failure(message, None)
        counted = self.sent_bytes if message.is_sent else self.received_bytes
        counted[action.peer] += message.num_bytes
        message.work = None

    def _failure(self, message: Message, error: RuntimeError | None) -> RunError:
        action = message.action
        what = f"{message.num_bytes} bytes {'to' if message.is_sent else 'from'} rank {action.peer}"
        why = why_not_through(error, self._deadline_s)
        return RunError(
            f"{self._name}: rank {self._rank} expected message {action.seq} of round {action.round} "
            f"({action.kind}, {what}) to go through within {self._deadline_s:g} s, found: {why}"
        )

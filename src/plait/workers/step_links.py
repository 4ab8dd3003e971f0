"""What the ranks of an instance send each other while they generate: hidden states from stage to stage, and what one
rank says to all. Nobody who sends waits until the other listens; receives are posted before they are needed.

All of it is in the order of steps, which all ranks share, so that no message says what it belongs to.

Shapes: T tokens of a step, H hidden size, N tokens of samples, W numbers of each, B bytes of N numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from plait.models.parallel.peers import Peers
from plait.models.parallel.transfer import Transfer

MOST_SENDS = 8
"""The most messages of one kind on their way at once: who is so far ahead waits."""
_FIRST_TAG, _TAGS = 1 << 29, 64
"""Tags beside those of training schedules; of a kind, taken in turn, so that no two messages on their way have the
same."""


class Kind(IntEnum):
    """Kinds of messages; each has tags of its own."""

    HIDDEN = 1
    MORE_HIDDEN = 2
    TOKENS = 3
    WORD = 4
    NUM_DRAFTS = 5
    DRAFTS = 6
    BITS = 7


@dataclass(eq=False)
class Waited:
    """Seconds that a rank has waited for others."""

    seconds: float = 0.0

    def wait(self, transfer: Transfer) -> Tensor:
        """`transfer.wait()`, whose tensor of any shape it returns; raises what that raises."""
        began = time.perf_counter()
        tensor = transfer.wait()
        self.seconds += time.perf_counter() - began
        return tensor


class _Sends:
    """Messages that nobody has waited for, the oldest first. What holds them must live until they are taken: gloo takes
    back what is forgotten."""

    def __init__(self, waited: Waited) -> None:
        self._waited = waited
        self._open: deque[Transfer] = deque()

    def add(self, transfer: Transfer, most: int) -> None:
        self._open.append(transfer)
        self.keep(most)

    def keep(self, most: int) -> None:
        """Wait for all but so many."""
        while len(self._open) > most:
            self._waited.wait(self._open.popleft())


class OneToAll:
    """Messages of one rank to all others of an instance; sizes are known to all.

    Args:
        peers: of the instance.
        source: place among them of the rank that tells.
        what: for errors.
    """

    def __init__(self, peers: Peers, source: int, kind: Kind, what: str, waited: Waited) -> None:
        self._peers, self._source, self._what = peers, source, what
        self._kind, self._count = kind, 0
        self._waited, self._sends = waited, _Sends(waited)
        self._others = [place for place in range(peers.size) if place != peers.index]

    @property
    def tells(self) -> bool:
        """Whether this rank is the one that says it."""
        return self._peers.index == self._source

    def tell(self, message: Tensor) -> None:
        """The next message, on a CPU, of any shape and dtype; it must stay as it is."""
        tag = self._next_tag()
        for place in self._others:
            sent = self._peers.isend(message, place, tag, self._what)
            self._sends.add(sent, MOST_SENDS * len(self._others))

    def listen(self, room: Tensor) -> Transfer:
        """Begin to receive the next message into a tensor on a CPU, of its shape and dtype."""
        return self._peers.irecv(room, self._source, self._next_tag(), self._what)

    def rest(self) -> None:
        """Nothing is told for now: until all others have taken what was.

        Raises:
            RunError: one is gone, or has not taken it until the deadline.
        """
        self._sends.keep(0)

    def said(self, message: Tensor) -> Tensor:
        """`tell` it, of any shape and dtype on a CPU, or wait for what was told in its place, in the same memory."""
        if not self.tells:
            return self._waited.wait(self.listen(message))
        self.tell(message)
        return message

    def _next_tag(self) -> int:
        self._count += 1
        return _tag(self._kind, self._count)


class StageLink:
    """Hidden states from the stage before to this one, and from this one to the next.

    A receive can be posted only when its size is known, and that is when its step begins: too late to hide the way. So
    all ranks say with each step how many rows the next one has, if nobody comes or ends (`expect`); a message of so
    many is posted at once. Rows that a step has not are sent as zeros, those beyond in a second message.

    Args:
        pp: the stages.
        room: memory for so many rows: [rows, H].
        is_ahead: whether receives are posted ahead. False where messages meet by order, not by tag (NCCL).
    """

    def __init__(self, pp: Peers, room: Callable[[int], Tensor], waited: Waited, *, is_ahead: bool) -> None:
        self._pp, self._room, self._waited, self._is_ahead = pp, room, waited, is_ahead
        self._sends = _Sends(waited)
        self._expected: deque[int] = deque((0,))
        """Rows of the first messages of the steps that have not begun; all ranks say the same."""
        self._posted: deque[Transfer] = deque()
        """Receives of these messages, where there are any."""
        self._first = 0
        """Rows of the first message of the step under way."""
        self._number = 0
        """Number of the step."""

    def expect(self, num_rows: int) -> None:
        """The step behind the one that begins now has so many rows, or fewer, or more."""
        if not self._is_ahead:
            return
        self._expected.append(num_rows)
        if num_rows and self._pp.index > 0:
            self._posted.append(self._irecv(Kind.HIDDEN, self._number + 2, num_rows))

    def receive(self, num_tokens: int) -> Tensor | None:
        """A step of so many tokens begins: [T, H] of the stage before; None on the first.

        Raises:
            RunError: the stage before is gone, or nothing came until the deadline.
        """
        self._number += 1
        self._first = first = self._expected.popleft() if self._expected else 0
        if self._pp.index == 0:
            return None
        more = self._irecv(Kind.MORE_HIDDEN, self._number, num_tokens - first) if num_tokens > first else None
        parts = [self._waited.wait(self._posted.popleft())] if first else []
        if more is not None:
            parts.append(self._waited.wait(more))
        hidden_TH = parts[0][:num_tokens] if len(parts) == 1 else torch.cat(parts)
        self._pp.traffic.received_bytes += hidden_TH.numel() * hidden_TH.itemsize
        return hidden_TH

    def send(self, hidden_TH: Tensor) -> None:
        """To the next stage; nothing on the last.

        Raises:
            RunError: the next stage is gone, or so far behind that it has not taken earlier ones until the deadline.
        """
        first = self._first
        if self._pp.index == self._pp.size - 1:
            return
        if 0 < len(hidden_TH) < first:
            lacking = hidden_TH.new_zeros(first - len(hidden_TH), hidden_TH.shape[1])
            self._isend(Kind.HIDDEN, torch.cat([hidden_TH, lacking]))
        elif first:
            self._isend(Kind.HIDDEN, hidden_TH[:first])
        if len(hidden_TH) > first:
            self._isend(Kind.MORE_HIDDEN, hidden_TH[first:])

    def agree(self, here: bool) -> bool:
        """Whether all stages say so; each asks before the same step.

        Raises:
            RunError: a stage is gone, or did not get here until the deadline.
        """
        return bool(self._pp.all_reduce(torch.tensor([int(here)]), "min"))

    def of_all_layers(self, own_NW: Tensor, columns: Sequence[int]) -> Tensor:
        """What each stage has of tokens, in the shapes of `Link.of_all_layers`.

        Raises:
            RunError: a stage is gone, or did not get here until the deadline.
        """
        room = self._room(0)
        bytes_WB = own_NW.t().contiguous().to(room.device).view(torch.uint8)  # NCCL has no int16
        parts = self._pp.all_gather(bytes_WB, columns)
        return torch.cat(parts).view(torch.int16).t()

    def rest(self) -> None:
        """No step follows for now: what was received ahead is nothing, so that other messages may pass by this way.

        Raises:
            RunError: a stage beside this one is gone, or did not get here until the deadline.
        """
        first = self._expected[0] if self._expected else 0
        self._expected = deque((0,))
        if first:
            self._number += 1
            if self._pp.index < self._pp.size - 1:
                self._isend(Kind.HIDDEN, self._room(first).zero_())
            if self._pp.index > 0:
                self._waited.wait(self._posted.popleft())
        self._sends.keep(0)

    def _irecv(self, kind: Kind, number: int, num_rows: int) -> Transfer:
        return self._pp.irecv(self._room(num_rows), self._pp.index - 1, _tag(kind, number), f"hidden states {number}")

    def _isend(self, kind: Kind, rows: Tensor) -> None:
        what = f"hidden states {self._number}"
        sent = self._pp.isend(rows.contiguous(), self._pp.index + 1, _tag(kind, self._number), what)
        self._sends.add(sent, MOST_SENDS)


def _tag(kind: Kind, number: int) -> int:
    return _FIRST_TAG + kind * _TAGS + number % _TAGS

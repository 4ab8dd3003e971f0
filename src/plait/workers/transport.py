"""Messages between ranks over a gloo group: sent in order, received by a thread for each sender.

What a rank is sent waits in its memory until it is asked for, so no sender waits for a rank that computes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from plait.errors import RunError, cause_of
from plait.launch.bell import Bell
from plait.models.parallel.transfer import WaitingFor
from plait.workers.messages import Message

_TAG = 7
LARGEST_BYTES = 1 << 34


class Transport:
    """This rank's end of its connections.

    Args:
        group: gloo, used by nobody else. Its timeout bounds how long a rank may have nothing to do. None: no peers.
        rank: of this process.
        peers: ranks that it hears from.
        waiting_for: told what each wait is for.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, peers: Sequence[int], *, waiting_for: WaitingFor = nullcontext
    ) -> None:
        self.rank = rank
        self.sent_bytes = 0
        """Bytes of arrays (rows, samples, results), as are `received_bytes`; not of headers."""
        self.received_bytes = 0
        self._group = group
        self._waiting_for = waiting_for
        self._inbox: dict[int, deque[Message]] = {peer: deque() for peer in peers}
        self._broken: dict[int, str] = {}
        self._changed = threading.Condition()
        self._bell = Bell()
        for peer in peers:
            threading.Thread(target=self._listen, args=(peer,), name=f"plait-transport-{peer}", daemon=True).start()

    def send(self, to: int, message: Message, what: str = "") -> None:
        """Send to a rank; returns when its thread has it.

        Raises:
            RunError: the rank is gone, or the message too large.
        """
        body = torch.frombuffer(message.to_bytes(), dtype=torch.uint8)
        if len(body) >= LARGEST_BYTES:
            raise RunError(
                f"{what or 'a message'} to rank {to} has {len(body) / 2**30:.1f} GiB, but a message may have "
                f"{LARGEST_BYTES / 2**30:.0f}; lower `prompts_per_step` or `samples_per_prompt`"
            )
        self.sent_bytes += message.num_array_bytes
        try:
            with self._waiting_for(f"rank {to} (takes {what or 'a message'})"):
                for tensor in (torch.tensor([len(body)]), body):
                    dist.send(tensor, to, group=self._group, tag=_TAG)
        except RuntimeError as error:
            raise RunError(
                f"rank {self.rank} expected rank {to} to take {what or 'a message'}, found: {cause_of(error)}"
            ) from error

    def receive(
        self, sources: Sequence[int], what: str, deadline_s: float, *, answers: Collection[int] | None = None
    ) -> tuple[int, Message]:
        """The next message of any of these ranks; whose it is, and the message.

        Args:
            answers: numbers of commands: only a message that answers one of them, others are kept for theirs; None: any

        Raises:
            RunError: such a rank is gone, or nothing came until the deadline.
        """
        names = ", ".join(map(str, sources))
        end = time.monotonic() + deadline_s
        with self._waiting_for(f"rank{'s' if len(sources) > 1 else ''} {names} ({what})"), self._changed:
            while (received := self._next(sources, what, answers)) is None:
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise RunError(f"rank {self.rank} expected {what} from rank {names} within {deadline_s:g} s")
            return received

    def poll(
        self,
        sources: Sequence[int],
        wait_s: float = 0.0,
        what: str = "",
        *,
        answers: Collection[int] | None = None,
    ) -> tuple[int, Message] | None:
        """As `receive`, None where nothing comes within `wait_s`.

        Raises:
            RunError: such a rank is gone.
        """
        with self._changed:
            received = self._next(sources, what, answers)
            if received is None and wait_s > 0:
                with self._waiting_for(f"rank {', '.join(map(str, sources))} ({what})"):
                    self._changed.wait(wait_s)
                received = self._next(sources, what, answers)
            return received

    def has(self, source: int, number: int) -> bool:
        """Whether `receive` of an answer of this rank to a command would return, or raise, at once."""
        with self._changed:
            return any(_answers(message, {number}) for message in self._inbox[source]) or source in self._broken

    def wait(self, seconds: float, what: str, others: Sequence[Any] = ()) -> bool:
        """Until a message comes, a connection breaks, one of `others` (with a `fileno`) can be read, or `seconds` have
        passed. What came since the last such wait ends it at once. Returns whether it was ended by anything."""
        with self._waiting_for(what):
            ready = connection.wait([source.fileno() for source in (self._bell, *others)], seconds)
        self._bell.hush()
        return bool(ready)

    def _ring(self) -> None:
        self._changed.notify_all()
        self._bell.ring()

    def _next(self, sources: Sequence[int], what: str, answers: Collection[int] | None) -> tuple[int, Message] | None:
        for source in sources:
            inbox = self._inbox[source]
            place = next((place for place, message in enumerate(inbox) if _answers(message, answers)), None)
            if place is not None:
                answer = inbox[place]
                del inbox[place]
                return source, answer
            if source in self._broken:
                raise RunError(
                    f"rank {self.rank} expected {what or 'a message'} from rank {source}, found it gone "
                    f"({self._broken[source]})"
                )
        return None

    def _listen(self, peer: int) -> None:
        try:
            while True:
                size = torch.zeros(1, dtype=torch.int64)
                dist.recv(size, peer, group=self._group, tag=_TAG)
                assert 0 < int(size) < LARGEST_BYTES, f"a message of {int(size)} bytes"
                body = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(body, peer, group=self._group, tag=_TAG)
                message = Message.from_bytes(np.asarray(body))
                with self._changed:
                    self.received_bytes += message.num_array_bytes
                    self._inbox[peer].append(message)
                    self._ring()
        except Exception as error:  # the thread's boundary: whoever receives is told
            with self._changed:
                self._broken[peer] = cause_of(error)
                self._ring()


def _answers(message: Message, numbers: Collection[int] | None) -> bool:
    return numbers is None or message.number in numbers

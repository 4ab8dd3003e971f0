"""Messages between the controller and a worker or a node: framed, tagged with a key, never blocking the reader.

A frame is its length, an HMAC-SHA256 tag and a pickled message. The tag covers the direction and a running number, so
that a frame can be neither forged, nor repeated, nor sent back. It is checked before anything is unpickled.
"""

from __future__ import annotations

import hmac
import pickle
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

from plait.launch.keys import Answer, Question
from plait.launch.worker_context import Place

KEY_BYTES = 32
MAX_MESSAGE_BYTES = 256 * 2**20
_HEAD = struct.Struct("<Q32s")
_NUMBER = struct.Struct("<Q")
_MESSAGES_AT_ONCE = 64


# -- to the worker


@dataclass(frozen=True)
class Start:
    """Construct the worker; answered like a call of number 0."""

    arguments: bytes
    """Pickled ((class of the worker, *args), kwargs)."""
    main_file: str | None
    """File of the controller's script, where `__main__` in a pickle is found; None if there is none."""
    main_module: str | None
    """Its module name, if it was started by that (`python -m`)."""
    argv: tuple[str, ...]
    """Its arguments, which the script may read where it is imported."""
    rank: int
    num_ranks: int
    beat_s: float
    place: Place


@dataclass(frozen=True)
class Call:
    number: int
    method: str
    arguments: bytes
    """Pickled (args, kwargs): unpickled by the thread that calls, whose errors are reported."""


@dataclass(frozen=True)
class Look:
    """Say where you are."""

    number: int


@dataclass(frozen=True)
class Stop:
    """End after the action that runs."""


@dataclass(frozen=True)
class StoreAnswer:
    """The answer to an Ask."""

    number: int
    answer: Answer


# -- from the worker


@dataclass(frozen=True)
class Beat:
    """I am alive."""


@dataclass(frozen=True)
class Remark:
    """To whoever launched the group; see `WorkerContext.tell`."""

    text: str


@dataclass(frozen=True)
class Raised:
    name: str
    """The exception in one line."""
    traceback: str
    exception: bytes | None
    """Pickled; None if it cannot be."""


@dataclass(frozen=True)
class Reply:
    number: int
    seconds: float
    value: bytes | Raised
    """The pickled result, or what was raised."""


@dataclass(frozen=True)
class Seen:
    """The answer to a Look."""

    number: int
    waits_for: str
    stack: str
    handles: str = ""
    """The exception that its main thread is handling, or that is on its way up through a `with`; empty if none."""


@dataclass(frozen=True)
class Ask:
    """A question for keys of the group's rendezvous; answered by StoreAnswer."""

    number: int
    question: Question


class Forged(Exception):
    """A frame without a valid tag has arrived."""


class Channel:
    """One end of a connection. Not safe for use by two threads at once: the owner locks.

    Args:
        link: a connected stream socket; owned from now on.
        key: KEY_BYTES of the group.
        controller: whether this is the controller's end.
    """

    def __init__(self, link: socket.socket, key: bytes, *, controller: bool) -> None:
        assert len(key) == KEY_BYTES, f"the key has {len(key)} bytes, expected {KEY_BYTES}"
        self.link = link
        self.ended = False
        """Whether the other end is closed; all that it had sent has been received."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self._key = key
        self._to, self._from = (b"w", b"c") if controller else (b"c", b"w")
        self._num_sent = self._num_received = 0
        self._unsent: deque[memoryview] = deque()
        self._head = bytearray(_HEAD.size)
        self._tag = b""
        self._body: bytearray | None = None
        self._filled = 0

    def _tagged(self, direction: bytes, number: int, body: bytes | bytearray) -> bytes:
        tag = hmac.new(self._key, direction + _NUMBER.pack(number), "sha256")
        tag.update(body)
        return tag.digest()

    # -- sending

    def put(self, message: object) -> bool:
        """Queue a message and send as much as goes without waiting; whether all went, see `flush`."""
        body = pickle.dumps(message, protocol=5)
        head = _HEAD.pack(len(body), self._tagged(self._to, self._num_sent, body))
        self._num_sent += 1
        self._unsent += [memoryview(head + body)] if len(body) < 65536 else [memoryview(head), memoryview(body)]
        return self.flush()

    def flush(self, *, wait: bool = False) -> bool:
        """Send what is queued; True when nothing is left. If the other end is gone, drops it all and says True."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            while self._unsent:
                sent = self.link.send(self._unsent[0], flags)
                self.bytes_sent += sent
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except BlockingIOError:
            return False
        except OSError:  # who receives finds `ended`
            self._unsent.clear()
        return True

    # -- receiving

    def receive(self) -> list[Any]:
        """The messages that are there, without waiting; sets `ended` after the last.

        Raises:
            Forged: what came was not made with the key.
        """
        messages: list[Any] = []
        while len(messages) < _MESSAGES_AT_ONCE and (body := self._next_body()) is not None:
            messages.append(pickle.loads(body))
        return messages

    def _next_body(self) -> bytearray | None:
        if self._body is None:
            if not self._fill(self._head):
                return None
            length, self._tag = _HEAD.unpack(self._head)
            if length > 2 * MAX_MESSAGE_BYTES:
                raise Forged(f"a message of {length} bytes is announced")
            self._body = bytearray(length)
        if not self._fill(self._body):
            return None
        body, self._body = self._body, None
        if not hmac.compare_digest(self._tag, self._tagged(self._from, self._num_received, body)):
            raise Forged("a message does not carry the key of this group")
        self._num_received += 1
        return body

    def _fill(self, buffer: bytearray) -> bool:
        """Receive into the rest of the buffer; True when it is full, and the next begins empty."""
        view = memoryview(buffer)
        try:
            while self._filled < len(buffer):
                received = self.link.recv_into(view[self._filled :], 0, socket.MSG_DONTWAIT)
                if received == 0:
                    self.ended = True
                    return False
                self._filled += received
                self.bytes_received += received
        except BlockingIOError:
            return False
        except OSError:
            self.ended = True
            return False
        self._filled = 0
        return True


def pickled_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> bytes:
    """Raises ValueError if they are too large, and what pickle raises if they cannot be sent."""
    data = pickle.dumps((args, kwargs), protocol=5)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"arguments of {len(data)} bytes are more than the {MAX_MESSAGE_BYTES} that may go through the controller; "
            "arrays travel from worker to worker"
        )
    return data

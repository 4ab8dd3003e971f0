"""Carries the bytes of several ranks' connections, and messages, over one connection between a node and the leader."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from plait.launch.bell import Bell
from plait.launch.nodes.messages import Closed, Data
from plait.launch.wire import Channel, Forged

_READ_BYTES = 1 << 20
_LONGEST_TURN_S = 0.5
"""What one turn counts of silence at most: when this process itself was held up, it was not the other's."""


class Cut(Exception):
    """The connection has ended."""


@dataclass
class _Stream:
    """This end of one rank's connection, and what is still to be given to it."""

    end: socket.socket
    waiting: deque[memoryview] = field(default_factory=deque)
    ending: bool = False
    events: int = 0


class Relay:
    """One end. One thread calls `turn` again and again; any thread may `send`, `attach` and `detach`."""

    def __init__(self, channel: Channel) -> None:
        self.silence_s = 0.0
        """For how long nothing has come."""
        self._channel = channel
        self._lock = threading.RLock()
        self._streams: dict[int, _Stream] = {}
        self._leaving: list[_Stream] = []
        self._turned = time.monotonic()
        self._bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._channel_events = selectors.EVENT_READ
        self._selector.register(channel.link, self._channel_events)

    def send(self, message: object) -> None:
        with self._lock:
            sent = self._channel.put(message)
        if not sent:
            self._bell.ring()

    def attach(self, rank: int, end: socket.socket) -> None:
        """Carry what is said on `end`, which is owned from now on, to the stream of that rank at the other end.
        What was its connection before is closed."""
        end.setblocking(False)
        self.detach(rank)
        with self._lock:
            self._streams[rank] = _Stream(end)
        self._bell.ring()

    def detach(self, rank: int) -> None:
        """Close a rank's stream."""
        with self._lock:
            if (stream := self._streams.pop(rank, None)) is not None:
                self._leaving.append(stream)
        self._bell.ring()

    def turn(self, seconds: float) -> list[object]:
        """Carry what there is to carry, and wait for it so long at most; the messages that have come.

        Raises:
            Cut: the connection has ended; says how.
        """
        with self._lock:
            self._set_interests()
        events = self._selector.select(seconds)
        with self._lock:
            messages: list[object] = []
            for key, mask in events:
                if key.fileobj is self._bell:
                    self._bell.hush()
                elif key.fileobj is self._channel.link:
                    messages += self._received() if mask & selectors.EVENT_READ else []
                elif (stream := self._streams.get(key.data)) is not None:
                    if mask & selectors.EVENT_WRITE:
                        self._give(key.data, stream)
                    if mask & selectors.EVENT_READ and key.data in self._streams:
                        self._take(key.data, stream)
            self._channel.flush()
            self._count_silence(bool(messages))
            return messages

    def close(self) -> None:
        """Close this end of everything."""
        with self._lock:
            for stream in (*self._streams.values(), *self._leaving):
                stream.end.close()
            self._streams.clear()
            self._leaving.clear()
            self._selector.close()
            for link in (self._channel.link, self._bell):
                link.close()

    def flush(self, seconds: float) -> None:
        """Send what is queued, for so long at most."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                if self._channel.flush():
                    return
            if time.monotonic() >= end:
                return
            time.sleep(0.005)

    def _set_interests(self) -> None:
        for stream in self._leaving:
            if stream.events:
                self._selector.unregister(stream.end)
            stream.end.close()
        self._leaving.clear()
        clear = self._channel.flush()
        events = selectors.EVENT_READ | (0 if clear else selectors.EVENT_WRITE)
        if events != self._channel_events:
            self._selector.modify(self._channel.link, events)
            self._channel_events = events
        for rank, stream in self._streams.items():
            # What the connection cannot take now is left in the ranks' sockets, so that they wait.
            events = (selectors.EVENT_READ if clear else 0) | (selectors.EVENT_WRITE if stream.waiting else 0)
            if events == stream.events:
                continue
            if not stream.events:
                self._selector.register(stream.end, events, rank)
            elif not events:
                self._selector.unregister(stream.end)
            else:
                self._selector.modify(stream.end, events, rank)
            stream.events = events

    def _received(self) -> list[object]:
        before, messages = self._channel.bytes_received, []
        try:
            received = self._channel.receive()
        except Forged as error:
            raise Cut(f"its connection was broken: {error}") from error
        if self._channel.bytes_received > before:
            self.silence_s = 0.0
        for message in received:
            match message:
                case Data(rank, data):
                    if (stream := self._streams.get(rank)) is not None:
                        stream.waiting.append(memoryview(data))
                        self._give(rank, stream)
                case Closed(rank):
                    if (stream := self._streams.get(rank)) is not None:
                        stream.ending = True
                        self._give(rank, stream)
                case _:
                    messages.append(message)
        if self._channel.ended and not messages:
            raise Cut("its connection was closed")
        return messages

    def _give(self, rank: int, stream: _Stream) -> None:
        try:
            while stream.waiting:
                sent = stream.end.send(stream.waiting[0])
                if sent == len(stream.waiting[0]):
                    stream.waiting.popleft()
                else:
                    stream.waiting[0] = stream.waiting[0][sent:]
        except BlockingIOError:
            return
        except OSError:  # who reads it is gone: what it said last is still read
            stream.waiting.clear()
        if stream.ending:
            self.detach(rank)

    def _take(self, rank: int, stream: _Stream) -> None:
        try:
            data = stream.end.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._channel.put(Data(rank, data))
        else:
            self._channel.put(Closed(rank))
            self.detach(rank)

    def _count_silence(self, heard: bool) -> None:
        now = time.monotonic()
        elapsed, self._turned = min(now - self._turned, _LONGEST_TURN_S), now
        self.silence_s = 0.0 if heard else self.silence_s + elapsed

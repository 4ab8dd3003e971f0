"""How two ends meet over the network: each proves that it has the run's key, and both get a key of the connection.

Both send a random number; the connection's key is made of these and the run's. So nothing that was said on another
connection can be said again on this one, and the run's key itself is never sent. Nothing is unpickled before.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time
from collections.abc import Iterator

from plait.errors import ConfigError, RunError
from plait.launch.wire import KEY_BYTES, Channel

_WORD = b"plait node 1\n"
_NUMBER_BYTES = 32
GREETING_S = 10.0
"""For a stranger to say who it is."""
_BETWEEN_TRIES_S = 0.2
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000))


class Stranger(Exception):
    """The other end has not shown that it has the run's key."""


def listening(address: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine; port 0: one that is free.

    Raises:
        ConfigError: it cannot.
    """
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        link.bind((address, port))
        link.listen(128)
    except OSError as error:
        link.close()
        raise ConfigError(
            f"the leader cannot listen on {address}:{port}: {error.strerror}; name a free port and an address of this "
            "machine with --leader"
        ) from error
    return link


def welcomed(link: socket.socket, key: bytes) -> tuple[Channel, bytes]:
    """The leader's end of a connection that has come, and the connection's key.

    Raises:
        Stranger: the other end has not the key, or did not say so in time. The connection is closed.
    """
    with _closed_to_strangers(link):
        link.settimeout(GREETING_S)
        ours = os.urandom(_NUMBER_BYTES)
        link.sendall(_WORD + ours)
        theirs, proof = _received(link, _NUMBER_BYTES), _received(link, KEY_BYTES)
        connection_key = _connection_key(key, ours, theirs)
        if not hmac.compare_digest(proof, _proof(connection_key, b"node")):
            raise Stranger("it has another key")
        link.sendall(_proof(connection_key, b"leader"))
        return _channel(link, connection_key, controller=True), connection_key


def introduced(link: socket.socket, key: bytes) -> tuple[Channel, bytes]:
    """A node's end of the connection to the leader, and the connection's key.

    Raises:
        Stranger: the other end is not the leader of this run: it has another key, or is something else. Closed then.
    """
    with _closed_to_strangers(link):
        link.settimeout(GREETING_S)
        if _received(link, len(_WORD)) != _WORD:
            raise Stranger("it is not the leader of a run of this version of plait")
        theirs, ours = _received(link, _NUMBER_BYTES), os.urandom(_NUMBER_BYTES)
        connection_key = _connection_key(key, theirs, ours)
        link.sendall(ours + _proof(connection_key, b"node"))
        if not hmac.compare_digest(_received(link, KEY_BYTES), _proof(connection_key, b"leader")):
            raise Stranger("it has another key")
        return _channel(link, connection_key, controller=False), connection_key


@contextlib.contextmanager
def _closed_to_strangers(link: socket.socket) -> Iterator[None]:
    """A connection of which an end that fails is a stranger, too: it is closed then."""
    try:
        yield
    except OSError as error:
        link.close()
        raise Stranger(str(error)) from error
    except Stranger:
        link.close()
        raise


def dialled(address: tuple[str, int], deadline: float) -> socket.socket:
    """A connection to the leader, tried again until `deadline` (of time.monotonic).

    Raises:
        RunError: nobody answers there.
    """
    host, port = address
    while True:
        try:
            return socket.create_connection(address, timeout=max(1.0, min(5.0, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() + _BETWEEN_TRIES_S >= deadline:
                raise RunError(
                    f"no leader answers at {host}:{port} ({error}); is the command of node 0 running, is --leader the "
                    "same on all nodes, and does a firewall let its port through?"
                ) from error
        time.sleep(_BETWEEN_TRIES_S)


def worker_key(connection_key: bytes, group: int) -> bytes:
    """The key between the leader and the workers that a node starts for a group: made at both ends, never sent."""
    return hmac.new(connection_key, b"workers of group %d" % group, "sha256").digest()


def _connection_key(key: bytes, leaders: bytes, nodes: bytes) -> bytes:
    return hmac.new(key, _WORD + leaders + nodes, "sha256").digest()


def _proof(connection_key: bytes, who: bytes) -> bytes:
    return hmac.new(connection_key, b"I am the " + who, "sha256").digest()


def _received(link: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        more = link.recv(count - len(received))
        if not more:
            raise Stranger("it closed the connection before it had shown the run's key")
        received += more
    return received


def _channel(link: socket.socket, key: bytes, *, controller: bool) -> Channel:
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE:
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                link.setsockopt(socket.IPPROTO_TCP, option, value)
    return Channel(link, key, controller=controller)

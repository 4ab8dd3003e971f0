"""What wakes a thread that waits on connections."""

from __future__ import annotations

import contextlib
import socket


class Bell:
    """Rung by any thread. Who waits on it beside connections (a selector, `connection.wait`) comes back at once, or
    does not begin to wait, until it is hushed."""

    def __init__(self) -> None:
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)

    def fileno(self) -> int:
        """To wait on: it can be read while the bell rings."""
        return self._bell.fileno()

    def ring(self) -> None:
        """Nothing where it rings already, or is closed."""
        with contextlib.suppress(OSError):
            self._rope.send(b"r")

    def hush(self) -> None:
        """From now on it rings no more, until it is rung again."""
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass

    def close(self) -> None:
        self._bell.close()
        self._rope.close()

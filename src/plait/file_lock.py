"""Which of several processes is alone at a file, by locks of the kernel (`flock`).

Such a lock is free as soon as its holder is dead, however it died. Nobody waits for one without an end. Imports the
standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SAID_AFTER_S = 2.0
"""How long a process waits for another before it says so."""

_ASKS_EVERY_S = 0.02
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What the system says of a lock where files cannot be locked."""


class StillHeld(TimeoutError):
    """Another process did not let go in time; the message says which, and of what file."""


def is_taken(descriptor: int, path: Path) -> bool:
    """Whether this process has the lock of an open file now, and it is the one at `path`: its holder may have removed
    it as we opened it.

    Raises:
        OSError: files cannot be locked there.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def sign(descriptor: int) -> None:
    """Have a lock file, which holds nothing else, say who has it."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n").encode(), 0)


def holder_of(descriptor: int) -> str:
    """Who has signed a lock file, for messages."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    return "another process"


@contextlib.contextmanager
def alone_at(path: Path, within_s: float, waits: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock on a lock file, which is made and stays; nobody else who asks for it goes on meanwhile. Where files
    cannot be locked it is taken that nobody asks.

    Args:
        within_s: how long another process is waited for.
        waits: gets the holder's name, once, when it has been waited for SAID_AFTER_S.

    Raises:
        StillHeld: another process has it all that time.
        OSError: the file cannot be opened.
    """
    begun_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        while holder := _holder(path, stack):
            waited_s = time.monotonic() - begun_s
            if waited_s >= within_s:
                raise StillHeld(f"{holder} has had {path} for {within_s:g} s; end it, or wait for it and try again")
            if waits is not None and waited_s >= SAID_AFTER_S:
                waits(holder)
                waits = None
            time.sleep(_ASKS_EVERY_S)
        yield


def _holder(path: Path, stack: contextlib.ExitStack) -> str:
    """Who else has a lock file; empty where it is taken now, until the stack ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, descriptor)
        try:
            if not is_taken(descriptor, path):
                return holder_of(descriptor)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        sign(descriptor)
        stack.push(opened.pop_all())
    return ""

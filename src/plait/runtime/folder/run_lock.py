"""Who works in the directory of a run: one process at a time, by a lock on RUN_DIR/run.lock.

The lock is the kernel's (`flock`): it is free as soon as its holder is dead, however it died.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from plait.errors import ConfigError
from plait.output import RUN_LOCK as LOCK


class Lock:
    """An exclusive `flock` on RUN_DIR/run.lock, with the holder's name in the file.

    Raises:
        ConfigError: another process holds it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or not os.path.samestat(os.fstat(self._fd), path.stat()):
                raise BlockingIOError  # its holder removed it as we opened it
        except BlockingIOError:
            holder = os.pread(self._fd, 4096, 0)
            self.drop()
            raise ConfigError(
                f"key `run_dir`: {folder} is in use by {_holder_text(holder)}; wait for it, end it, "
                "or give another `run_dir`"
            ) from None
        except OSError:
            self.drop()
            raise
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n"
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)
        _HELD.add(self)

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def release(self) -> None:
        if self.held:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self.drop()

    def drop(self) -> None:
        """Close this process's view of the lock; it stays locked while another process has it open."""
        os.close(self._fd)
        self._fd = -1


class Lent:
    """In place of the lock in a process that does not hold it: its holder lives as long."""

    held = False

    def release(self) -> None:
        pass


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked worker shares the lock's open file: if it kept it, it would hold the run after its parent's death."""
    for lock in list(_HELD):
        if lock.held:
            lock.drop()


os.register_at_fork(after_in_child=_release_in_child)


def _holder_text(content: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']}"
    return "another process"

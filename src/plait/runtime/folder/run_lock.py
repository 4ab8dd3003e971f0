"""Who works in the directory of a run: one process at a time, by a lock on RUN_DIR/run.lock; and who asks that."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path

from plait.errors import ConfigError
from plait.file_lock import NO_LOCKS, holder_of, is_taken, sign
from plait.output import RUN_LOCK

TRIES_S, _TRIES_EVERY_S = 1.0, 0.02
"""How long, and how often, a lock is tried that nobody works under: who asks has it for a moment, and who leaves may
remove its file as we open it."""


class Lock:
    """The lock on RUN_DIR/run.lock, with the holder's name in the file. Nobody who works there is waited for.

    Raises:
        ConfigError: another process holds it, or files cannot be locked there.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path, until_s = folder / RUN_LOCK, time.monotonic() + TRIES_S
        self._fd = _opened(path)
        try:
            while not is_taken(self._fd, path):
                worker = worker_at(folder)
                if worker is not None or time.monotonic() >= until_s:
                    raise ConfigError(
                        f"key `run_dir`: {folder} is in use by {worker or holder_of(self._fd)}; wait for it, end it, "
                        "or give another `run_dir`"
                    )
                time.sleep(_TRIES_EVERY_S)
                self.drop()
                self._fd = _opened(path)
            sign(self._fd)
            os.fsync(self._fd)  # ranks on other machines read it
        except (ConfigError, OSError) as error:
            if self.held:
                self.drop()
            if isinstance(error, OSError) and error.errno in NO_LOCKS:
                raise ConfigError(
                    f"key `run_dir`: files cannot be locked in {folder} ({error.strerror}), so two runs could write "
                    "there at once; have it mounted with locks (Lustre: option `flock`), or give another `run_dir`"
                ) from error
            raise
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


def worker_at(folder: Path) -> str | None:
    """Who works in the directory of a run; None: nobody, as far as its lock tells, which is shared for a moment to see
    that. A run that begins then tries again."""
    with contextlib.suppress(OSError), open(folder / RUN_LOCK, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return holder_of(file.fileno())
    return None


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked worker shares the lock's open file: if it kept it, it would hold the run after its parent's death."""
    for lock in list(_HELD):
        if lock.held:
            lock.drop()


os.register_at_fork(after_in_child=_release_in_child)

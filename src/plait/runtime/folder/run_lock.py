"""Who works in the directory of a run: one process at a time, by a lock on RUN_DIR/run.lock."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from plait.errors import ConfigError
from plait.file_lock import NO_LOCKS, holder_of, is_taken, sign
from plait.output import RUN_LOCK


class Lock:
    """The lock on RUN_DIR/run.lock, with the holder's name in the file. Nobody is waited for.

    Raises:
        ConfigError: another process holds it, or files cannot be locked there.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / RUN_LOCK
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not is_taken(self._fd, path):
                raise ConfigError(
                    f"key `run_dir`: {folder} is in use by {holder_of(self._fd)}; wait for it, end it, "
                    "or give another `run_dir`"
                )
            sign(self._fd)
            os.fsync(self._fd)  # ranks on other machines read it
        except (ConfigError, OSError) as error:
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


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked worker shares the lock's open file: if it kept it, it would hold the run after its parent's death."""
    for lock in list(_HELD):
        if lock.held:
            lock.drop()


os.register_at_fork(after_in_child=_release_in_child)

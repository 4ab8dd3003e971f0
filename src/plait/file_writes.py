"""Writes that the file system may refuse: why it does, in words; and files that are appended to, where what is
appended stands whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from plait.errors import RunError


def why_not_written(path: Path, error: OSError) -> str:
    """What the system says against writing to a path; where room is what is missing, how much there is, and what
    helps; where a link leads nowhere, which."""
    why = error.strerror or str(error)
    if error.errno in (errno.EEXIST, errno.ENOENT):
        lost = next((place for place in (path, *path.parents) if place.is_symlink() and not place.exists()), None)
        return why if lost is None else f"{lost} is a link to {os.readlink(lost)}, which does not exist"
    if error.errno == errno.EFBIG and (most := resource.getrlimit(resource.RLIMIT_FSIZE)[0]) != resource.RLIM_INFINITY:
        return f"{why}: here a file may have {most:,} bytes; raise that limit (`ulimit -f`)"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return why
    around = next((folder for folder in path.parents if os.path.exists(folder)), Path("/"))
    try:
        room = os.statvfs(around)
    except OSError:
        return f"{why}; free space there"
    free = f"{room.f_bavail * room.f_frsize / 2**20:.1f} MiB"
    files = " and no further file" if room.f_files and not room.f_favail else ""
    return f"{why}: {free}{files} are free there; free space"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """For a file of a run that has begun, or its folder.

    Raises:
        RunError: what is done within finds that it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be written: {why_not_written(path, error)}") from error


class AppendedFile:
    """Base of what appends to a file. What was appended survives the death of this process. Use as a context manager.

    Args:
        keep: go on behind what the file holds; otherwise it is begun anew.
        opened: a descriptor of it that is open to append, which is closed with it; None: it is opened.

    Raises:
        RunError: the file system refuses a write (a full disk); the file then ends with what was appended before.
    """

    def __init__(self, path: Path, *, keep: bool, opened: int | None = None) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if keep else os.O_TRUNC)
        with writing(path):
            self._fd = os.open(path, flags, 0o644) if opened is None else opened
            self._offset = os.fstat(self._fd).st_size

    @property
    def offset(self) -> int:
        """Bytes written so far: a place at which the file may be cut."""
        return self._offset

    def _write(self, data: bytes) -> None:
        with writing(self.path):
            try:
                written = 0
                while written < len(data):
                    written += os.write(self._fd, data[written:])
            except OSError:
                os.ftruncate(self._fd, self._offset)
                raise
        self._offset += len(data)

    def sync(self) -> None:
        """Force what was written to disk, so that it survives the machine's fall too. Raises OSError."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; harmless when done before."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

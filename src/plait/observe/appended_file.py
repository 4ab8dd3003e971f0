"""Files that a run appends to: what is appended stands there whole or, if the file system refuses it, not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from plait.errors import RunError
from plait.output import why_not_written


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

    Raises:
        RunError: the file system refuses a write (a full disk); the file then ends with what was appended before.
    """

    def __init__(self, path: Path, *, keep: bool) -> None:
        self.path = path
        with writing(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if keep else os.O_TRUNC), 0o644)
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

"""A folder for as long as a process needs it. Where that is killed, the next that makes one removes it. Imports
`file_lock` and the standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from plait.file_lock import NO_LOCKS, is_taken


class TemporaryFolder:
    """A new folder where the system has temporary files, until `close`. Use as a context manager, or call that.

    Its maker holds the kernel's lock on it, which is free when that is dead, however it died. Whoever makes another for
    the same purpose removes those of the same user that nobody holds.

    Args:
        purpose: a word for the folder's name, `plait.PURPOSE.…`.
    """

    def __init__(self, purpose: str) -> None:
        beginning = f"plait.{purpose}."
        for left in _left_behind(beginning):
            shutil.rmtree(left, ignore_errors=True)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=beginning))
            with contextlib.suppress(FileNotFoundError):  # taken for one that was left behind, before it was held
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                if _is_held(self._descriptor, self.path):
                    return
                os.close(self._descriptor)

    def close(self) -> None:
        """Remove it. Harmless when done before."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_held(descriptor: int, path: Path) -> bool:
    """Whether this process has the folder from now on. Where files cannot be locked, nobody takes it for left."""
    try:
        return is_taken(descriptor, path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return True


def _left_behind(beginning: str) -> Iterator[Path]:
    """Folders of this user whose names begin so and that nobody holds, each held while it is given."""
    for path in Path(tempfile.gettempdir()).glob(f"{beginning}*"):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.getuid() and is_taken(descriptor, path):
                yield path

"""A folder for as long as a process needs it. Where that is killed, the next that makes one removes it. Imports
`file_lock` and the standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
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
        self.path, descriptor = _held(beginning)
        self._end = weakref.finalize(self, _end, self.path, descriptor, os.getpid())

    def close(self) -> None:
        """Remove it, as is done at the latest when its maker leaves. Harmless when done before."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _held(beginning: str) -> tuple[Path, int]:
    """A new folder, and the descriptor by which this process has its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=beginning))
        with contextlib.suppress(FileNotFoundError):  # taken for one that was left behind, before it was held
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                held = is_taken(descriptor, path)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                held = True  # nobody can take it for one that was left
            if held:
                return path, descriptor
            os.close(descriptor)


def _end(path: Path, descriptor: int, maker: int) -> None:
    if os.getpid() == maker:  # not a child that it has forked
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _left_behind(beginning: str) -> Iterator[Path]:
    """Folders of this user whose names begin so and that nobody holds, each held while it is given."""
    for path in Path(tempfile.gettempdir()).glob(f"{beginning}*"):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid == os.getuid() and is_taken(descriptor, path):
                yield path

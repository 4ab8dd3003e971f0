"""What each rank is doing, in a file that all processes of a run map: it tells the rest of a rank that was killed."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

_BYTES = 128
"""Of one rank's line."""


class Board:
    """This rank's line; `Board(None, 0)` is written nowhere. One writer per rank."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self._start = rank * _BYTES
        self._map: mmap.mmap | None = None
        self._doing = ""
        if path is not None:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def create(path: Path, num_ranks: int) -> None:
        path.write_bytes(b"\0" * (num_ranks * _BYTES))

    @contextlib.contextmanager
    def doing(self, action: str) -> Iterator[None]:
        """Say it while inside, and after an exception too: it names what failed."""
        before = self._doing
        self._write(action)
        yield
        self._write(before)

    def _write(self, action: str) -> None:
        self._doing = action
        if self._map is not None:
            self._map[self._start : self._start + _BYTES] = action.encode()[:_BYTES].ljust(_BYTES, b"\0")


def read_board(path: Path) -> list[str]:
    """What each rank was doing; empty where it had nothing to do."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    lines = [data[at : at + _BYTES] for at in range(0, len(data), _BYTES)]
    return [line.rstrip(b"\0").decode(errors="replace") for line in lines]

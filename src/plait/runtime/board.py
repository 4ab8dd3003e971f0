"""What each rank is doing, in one small file: it is still there when the rank has been killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_BYTES = 128
"""Of one rank's line."""


class Board:
    """This rank's line; `Board(None, 0)` is written nowhere. One writer per rank."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self.rank = rank
        self._start = rank * _BYTES
        self._file = -1 if path is None else os.open(path, os.O_WRONLY)
        self._doing = ""

    @staticmethod
    def create(path: Path, num_ranks: int) -> None:
        path.write_bytes(b"\0" * (num_ranks * _BYTES))

    @contextlib.contextmanager
    def doing(self, action: str) -> Iterator[None]:
        """Say it while inside, and after an error too: it names what failed."""
        before = self._doing
        self._write(action)
        try:
            yield
        except StopIteration:  # the end of what was iterated over
            self._write(before)
            raise
        self._write(before)

    def _write(self, action: str) -> None:
        self._doing = action
        if self._file >= 0:
            os.pwrite(self._file, action.encode()[:_BYTES].ljust(_BYTES, b"\0"), self._start)


def read_board(path: Path) -> list[str]:
    """What each rank was doing; empty where it had nothing to do."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    lines = [data[at : at + _BYTES] for at in range(0, len(data), _BYTES)]
    return [line.rstrip(b"\0").decode(errors="replace") for line in lines]

"""What each rank is doing, and a number that changes with all that it does, in one small file.

It is still there when the rank has been killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from plait.schedule.work import Result, Work

LINE_BYTES = 128
"""Bytes of one rank's line."""
_COUNT_BYTES = 8
_TEXT_BYTES = LINE_BYTES - _COUNT_BYTES


class StatusFile:
    """This rank's line; `StatusFile(None, 0)` is written nowhere. One writer per rank."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self.rank = rank
        self._start = rank * LINE_BYTES
        self._file = -1 if path is None else os.open(path, os.O_WRONLY)
        self._doing = ""
        self._count = 0

    @staticmethod
    def create(path: Path, num_ranks: int) -> None:
        path.write_bytes(b"\0" * (num_ranks * LINE_BYTES))

    @contextlib.contextmanager
    def doing(self, action: str) -> Iterator[None]:
        """Say it while inside, and after an error too: it names what failed."""
        before = self._doing
        self._write(action)
        self.tick()
        try:
            yield
        except StopIteration:  # the end of a work
            self._write(before)
            raise
        self._write(before)

    def through(self, action: str, work: Work[Result]) -> Work[Result]:
        """The same work; the line says what it is while it goes on."""
        while True:
            with self.doing(action):
                try:
                    done = next(work)
                except StopIteration as end:
                    return end.value
            yield done

    def tick(self) -> None:
        """Something was done: a rank that does not say so for too long, and waits for nobody who does, counts as
        stalled."""
        self._count += 1
        if self._file >= 0:
            os.pwrite(self._file, self._count.to_bytes(_COUNT_BYTES, "little"), self._start + _TEXT_BYTES)

    def _write(self, action: str) -> None:
        self._doing = action
        if self._file >= 0:
            os.pwrite(self._file, action.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), self._start)


def read_status(path: Path) -> list[str]:
    """What each rank was doing; empty where it had nothing to do."""
    return [line[:_TEXT_BYTES].rstrip(b"\0").decode(errors="replace") for line in _lines(path)]


def read_progress(path: Path) -> list[int]:
    """A number of each rank, which changes with all that it does."""
    return [int.from_bytes(line[_TEXT_BYTES:], "little") for line in _lines(path)]


def _lines(path: Path) -> list[bytes]:
    try:
        data = path.read_bytes()
    except OSError:
        return []
    return [data[at : at + LINE_BYTES] for at in range(0, len(data), LINE_BYTES)]

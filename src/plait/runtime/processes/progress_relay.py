"""Progress from the leader to the process that shows it: calls of `observe.progress.Progress`, as lines of a file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from plait.observe.progress import Progress

_WRITE_S = 0.1
"""Units of a phase are told at most so often."""
_READ_S = 0.1
_END_S = 10.0


class RelayedProgress:
    """What the leader calls in place of `Progress`. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed in __exit__
        self._count = 0
        self._told_s = 0.0

    def start(self, steps_done: int = 0) -> None:
        self._tell("start", steps_done)

    def phase(self, name: str, total: int = 0, unit: str = "") -> None:
        self._flush_count()
        self._tell("phase", name, total, unit)

    def advance(self, count: int = 1) -> None:
        self._count += count
        if time.monotonic() - self._told_s > _WRITE_S:
            self._flush_count()

    def step_done(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._flush_count()
        self._tell("step_done", step, dict(metrics))

    def message(self, text: str) -> None:
        self._tell("message", text)

    def __enter__(self) -> RelayedProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush_count()
        self._file.close()

    def _flush_count(self) -> None:
        if self._count:
            self._tell("advance", self._count)
            self._count, self._told_s = 0, time.monotonic()

    def _tell(self, what: str, *values: Any) -> None:
        self._file.write(json.dumps([what, *values]) + "\n")
        self._file.flush()


class ProgressRelay:
    """Reads such a file from a thread, as it grows, and shows what it says. Use as a context manager."""

    def __init__(self, path: Path, progress: Progress) -> None:
        path.write_text("")
        self._file: TextIO = open(path, encoding="utf-8")  # noqa: SIM115  closed in __exit__
        self._progress = progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="plait-relay", daemon=True)

    def __enter__(self) -> ProgressRelay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(_END_S)
        self._file.close()

    def _follow(self) -> None:
        rest = ""
        while True:
            last = self._ended.wait(_READ_S)
            *lines, rest = (rest + self._file.read()).split("\n")
            for line in lines:
                self._show(*json.loads(line))
            if last:
                return

    def _show(self, what: str, *values: Any) -> None:
        progress = self._progress
        match what:
            case "start":
                progress.start(*values)
            case "phase":
                progress.phase(*values)
            case "advance":
                progress.advance(*values)
            case "step_done":
                progress.step_done(*values)
            case "message":
                progress.message(*values)
            case _:
                raise AssertionError(f"the leader told `{what}`")

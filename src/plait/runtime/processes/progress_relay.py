"""Progress from the leader to the process that shows it: calls of `observe.progress.Progress`, as texts."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from plait.observe.beside_steps import NONE_BESIDE
from plait.observe.progress import Progress

_WRITE_S = 0.1
"""Units of a phase are told at most so often."""
_END_S = 10.0
SILENT_S = 5.0
"""After so long without a word of the leader it is asked what it waits for."""


class RelayedProgress:
    """What the leader calls in place of `Progress`. Use as a context manager.

    Args:
        tell: has the process that shows it hear a text (`WorkerContext.tell`).
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell_text = tell
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

    def step_done(
        self, step: int, metrics: Mapping[str, Any], beside: Mapping[str, float] = NONE_BESIDE, once_s: float = 0.0
    ) -> None:
        self._flush_count()
        self._tell("step_done", step, dict(metrics), dict(beside), once_s)

    def message(self, text: str) -> None:
        self._tell("message", text)

    def __enter__(self) -> RelayedProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush_count()

    def _flush_count(self) -> None:
        if self._count:
            self._tell("advance", self._count)
            self._count, self._told_s = 0, time.monotonic()

    def _tell(self, what: str, *values: Any) -> None:
        self._tell_text(json.dumps([what, *values]))


class ProgressRelay:
    """Shows what the leader tells, from a thread of its own. Use as a context manager.

    Args:
        waits_for: asked while the leader has begun and says nothing: what it waits for, which is shown once; empty:
            nothing worth a word.
    """

    def __init__(self, progress: Progress, waits_for: Callable[[], str] = str) -> None:
        self._progress = progress
        self._waits_for = waits_for
        self._asks = False
        self._heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="plait-relay", daemon=True)

    def hear(self, rank: int, text: str) -> None:
        """Take what a rank tells; returns at once."""
        self._heard.put(text)

    def __enter__(self) -> ProgressRelay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._heard.put(None)
        self._thread.join(_END_S)

    def _follow(self) -> None:
        while (text := self._next()) is not None:
            self._show(*json.loads(text))

    def _next(self) -> str | None:
        while self._asks:
            try:
                return self._heard.get(timeout=SILENT_S)
            except queue.Empty:
                if wait := self._waits_for():
                    self._asks = False
                    self._progress.message(wait)
        return self._heard.get()

    def _show(self, what: str, *values: Any) -> None:
        progress = self._progress
        match what:
            case "start":
                self._asks = True
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

"""A limit in time for Python code that is not ours and that we run in this process, such as a chat template's.

A thread of its own watches the clock and breaks off what is over its limit, between two instructions of Python; what
does not return from one call of C is not reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator


class OverTime(Exception):
    """The code within took longer than it may."""


class _Watch:
    """The deadline of each thread that has one; at most one for each thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> None:
        with self._changed:
            self._ends[threading.get_ident()] = time.monotonic() + seconds
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="time limit", daemon=True)
                self._thread.start()

    def end(self) -> None:
        # An OverTime that is under way already comes out of here: still within the block.
        with self._changed:
            self._ends.pop(threading.get_ident(), None)

    def _watch(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(0.05)
            with self._changed:
                now = time.monotonic()
                for thread in [thread for thread, end in self._ends.items() if end < now]:
                    del self._ends[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OverTime))
                if self._ends:
                    idle_since = now
                elif now - idle_since > 1:
                    self._thread = None
                    return


_WATCH = _Watch()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OverTime in what is within when it takes longer. Not to be nested."""
    _WATCH.begin(seconds)
    try:
        yield
    finally:
        _WATCH.end()

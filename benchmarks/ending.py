"""How a benchmark that is terminated ends: as by an error, so that nothing it has started is left."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_when_terminated() -> Iterator[None]:
    """Within it SIGTERM raises `SystemExit`: processes and folders are given back, and what was measured is told."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

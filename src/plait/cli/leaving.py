"""How the process ends when its command has: neither threads that a user's code left behind keep it, nor garbage."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading

from plait.observe.screen import say

GRACE_S = 5.0
"""For threads to end by themselves, as those of pools and trackers do when Python leaves."""


def leave_behind(code: int) -> None:
    """Have this process end with `code` though threads go on: Python would wait for those that are no daemons. It would
    also look through all objects of torch and Transformers for what may go, which takes seconds, and nobody needs."""
    gc.freeze()
    others = [
        thread for thread in threading.enumerate() if thread is not threading.current_thread() and not thread.daemon
    ]
    if not others:
        return

    def end() -> None:
        names = ", ".join(thread.name for thread in others if thread.is_alive())
        with contextlib.suppress(OSError, ValueError):
            say(f"left behind threads that do not end: {names}", file=sys.stderr)
            sys.stdout.flush()
        os._exit(code)

    watch = threading.Timer(GRACE_S, end)
    watch.daemon = True
    watch.start()

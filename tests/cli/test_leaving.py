"""Threads and garbage that are left behind, as the process ends."""

from __future__ import annotations

import subprocess
import sys
import time

LEAVES = """
import sys, threading, time
from plait.cli import leaving, main
leaving.GRACE_S = 0.2
threading.Thread(target=time.sleep, args=(1000,), name="mine").start()
sys.argv = ["plait", "--version"]
sys.exit(main())
"""


def test_a_thread_that_is_left_behind_does_not_keep_the_command() -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begun < 60
    assert (done.returncode, done.stderr) == (0, "left behind threads that do not end: mine\n")


GARBAGE = """
import sys
from plait.cli import main
class Looked:
    def __del__(self):
        print("looked through", flush=True)
kept = Looked()
kept.itself = kept
sys.argv = ["plait", "--version"]
code = main()
del kept
sys.exit(code)
"""


def test_what_is_there_at_the_end_is_not_looked_through_for_garbage() -> None:
    """The objects of torch and Transformers alone would take seconds, each time."""
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "looked through" not in done.stdout

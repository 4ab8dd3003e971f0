"""Processes that leave it to the one that started them when to stop."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import multiprocessing, os, signal, subprocess, time
from plait.orphan_guard import leave_stopping_to_parent

leave_stopping_to_parent()
for _ in range(5):
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    forked.terminate()
    forked.join()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
started = subprocess.Popen(["sleep", "60"])
started.terminate()
print(forked.exitcode, started.wait())
"""


def test_a_signal_to_all_processes_of_a_job_is_for_the_command_alone() -> None:
    """What such a process forks, as `multiprocessing` does, or starts is ended by `terminate` as ever, and at once."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["-15", "-15"]

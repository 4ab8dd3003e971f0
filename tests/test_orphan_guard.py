"""Processes that leave it to the one that started them when to stop."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal, subprocess, time
from plait.orphan_guard import leave_stopping_to_parent

leave_stopping_to_parent()
for number in (signal.SIGINT, signal.SIGTERM):
    os.kill(os.getpid(), number)
forked = os.fork()
if forked == 0:
    time.sleep(60)
started = subprocess.Popen(["sleep", "60"])
for child in (forked, started.pid):
    os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), started.wait())
"""


def test_a_signal_to_all_processes_of_a_job_is_for_the_command_alone() -> None:
    """What such a process forks, as `multiprocessing` does, or starts is ended by `terminate` as ever."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["-15", "-15"]

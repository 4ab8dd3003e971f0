"""Processes that leave it to the one that started them when to stop."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import multiprocessing, os, signal, subprocess, threading, time
from plait.orphan_guard import leave_stopping_to_parent

leave_stopping_to_parent()
for _ in range(5):
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    forked.terminate()
    forked.join()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
ended = []

def fork_and_terminate():
    for _ in range(20):
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        forked.start()
        forked.terminate()
        forked.join(30)
        ended.append(forked.exitcode)

thread = threading.Thread(target=fork_and_terminate)
thread.start()
while thread.is_alive():  # forks and signals at the same time
    os.kill(os.getpid(), signal.SIGTERM)
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
signal.signal(signal.SIGINT, own := lambda *_: None)
if (child := os.fork()) == 0:
    os._exit(signal.getsignal(signal.SIGINT) is not own)
assert os.waitpid(child, 0)[1] == 0
assert signal.getsignal(signal.SIGINT) is own
started = subprocess.Popen(["sleep", "60"])
started.terminate()
print(forked.exitcode, *set(ended), started.wait())
"""


def test_a_signal_to_all_processes_of_a_job_is_for_the_command_alone() -> None:
    """What such a process forks, as `multiprocessing` does in any thread, or starts is ended by `terminate` as ever,
    and at once; handlers that others have set stay."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["-15", "-15", "-15"]

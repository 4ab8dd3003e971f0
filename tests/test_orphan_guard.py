"""Processes that leave it to the one that started them when to stop, and end if that says nothing any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

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


WATCHED = """
import signal, sys
from plait.orphan_guard import end_unless_heard

signal.signal(signal.SIGCONT, lambda *_: print("goes on", flush=True))
end_unless_heard(int(sys.argv[1]), 4)
print("begins", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.slow
def test_what_its_owner_says_nothing_to_ends_but_not_while_it_is_stopped_itself() -> None:
    """At first both are stopped, as when a scheduler suspends a job: five seconds that do not count. Then it runs and
    hears nothing for four, which do."""
    beats, ours = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(beats)],
        pass_fds=[beats],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(beats)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begins\n"
        os.write(ours, b".")
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "goes on\n"
        time.sleep(0.7)  # longer than a look takes
        assert process.poll() is None
        _, said = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert said.startswith("nothing came for 4 s from the process that started this rank")
    finally:
        process.kill()
        os.close(ours)

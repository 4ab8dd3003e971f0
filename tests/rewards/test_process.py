"""The processes of the pool: what they import, what reaches them, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.settings import RewardSettings
from tests.cases import slow_but
from tests.processes import alive, gone
from tests.rewards import samples
from tests.rewards.pools import score
from tests.rewards.samples import group


def test_workers_import_nothing_heavy():
    (one,) = score("tests.rewards.samples:modules", group(0, "a"))
    assert one.extras["heavy"] == ([],)


def test_no_process_is_left_after_close_or_an_exception():
    seen: list[int] = []

    def use_and_fail():
        with RewardPool(reward_functions([samples.pids]), RewardSettings(workers=2)) as pool:
            for result in pool.score(group(0, "a") + group(1, "b") + group(2, "c")):
                seen.append(result.extras["pid"][0])
            pool.submit(group(3, "d"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use_and_fail()
    assert seen
    assert not any(alive(pid) for pid in seen)


def test_close_ends_a_hung_worker_and_may_be_called_again(tmp_path):
    pool = RewardPool(reward_functions([samples.pids, samples.faulty]), RewardSettings(timeout_s=100))
    (one,) = pool.score(group(0, "a"))
    pool.submit(group(1, "hang in C"))
    pool.poll()
    pool.close()
    assert not alive(one.extras["pid"][0])
    pool.close()
    with pytest.raises(AssertionError, match="closed"):
        pool.submit(group(2, "a"))


SCRIPT = """
import os, signal, sys, time
from tests.rewards.samples import group
from plait.rewards.functions import reward_functions
from plait.rewards.pool import RewardPool
from plait.rewards.settings import RewardSettings

ASKED = sys.argv[1]  # also where a worker imports it

def in_the_script(completions, log_extra, **columns):
    log_extra("pid", [os.getpid()] * len(completions))
    return [4.0] * len(completions)

if __name__ == "__main__":
    functions = reward_functions([in_the_script, "tests.rewards.samples:faulty"])
    with RewardPool(functions, RewardSettings(timeout_s=100)) as pool:
        one, = pool.score(group(0, "abc"))
        pool.submit(group(1, ASKED))
        interrupts = []
        signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
        print(one.rewards[0], one.extras["pid"][0], flush=True)
        while True:
            time.sleep(0.05)
            pool.poll()
            if interrupts:
                print("interrupted", pool.num_outstanding, flush=True)
                interrupts.clear()
"""


def start_script(tmp_path, word):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), word],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
    assert process.stdout is not None
    reward, pid = process.stdout.readline().split()
    assert float(reward) == 7.0, "a function of the script itself: 4, and 3 of the other"
    return process, int(pid)


@pytest.mark.parametrize("word", slow_but(["hang"], ["hang", "hang in C"]))
def test_workers_die_with_a_parent_that_is_killed(tmp_path, word):
    process, worker = start_script(tmp_path, word)
    assert alive(worker)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    assert gone(worker)
    process.stdout.close()


def test_signals_to_stop_are_for_the_parent_only(tmp_path):
    process, worker = start_script(tmp_path, "hang")
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
    for number in (signal.SIGINT, signal.SIGTERM):  # as Slurm does: to all processes of a job
        os.kill(worker, number)
    assert process.stdout.readline().split() == ["interrupted", "1"]
    assert alive(worker)
    process.kill()
    process.wait(timeout=10)
    assert gone(worker)
    process.stdout.close()


def test_a_script_that_starts_a_run_when_imported_is_stopped(tmp_path):
    (tmp_path / "unguarded.py").write_text(
        "from plait.rewards.functions import reward_functions\n"
        "from plait.rewards.pool import RewardPool\n"
        "def f(completions, **_): return [1.0]\n"
        "with RewardPool(reward_functions([f])) as pool: pool.start()\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "unguarded.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "if __name__ == '__main__'" in done.stderr

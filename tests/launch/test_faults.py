"""Real processes that die, freeze, hang and raise; a controller that is killed; nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from plait.launch import monitor
from plait.launch.failures import Ended, WorkerError
from plait.launch.local import LocalProcesses
from plait.launch.watch import Watch
from tests.launch.workers import Echo, Summing, Unbuildable, waiter
from tests.processes import alive, gone, until

LIMIT_S = 60.0
FREEZE_S = 1.2
"""In these tests: a busy machine must let a thread run for once in this time."""


def failure_of(handle, limit_s=LIMIT_S):
    with pytest.raises(WorkerError) as caught:
        handle.result(limit_s)
    return caught.value.failure


@pytest.fixture
def pair(tmp_path):
    with LocalProcesses(output_dir=tmp_path / "workers").start(Echo, 2) as group:
        yield group
        pids = group.pids
    assert not any(alive(pid) for pid in pids)


# -- death


def test_kill_9_names_rank_action_and_who_waited(pair, tmp_path):
    waiting = waiter(pair, 0, 1, tmp_path)
    killed = pair.submit(1, "nap", 1000.0)
    pair.submit(1, "back").done  # noqa: B018  more may stand behind
    time.sleep(0.3)
    os.kill(pair.pids[1], signal.SIGKILL)
    failure = failure_of(waiting, limit_s=10.0)
    assert (failure.ended, failure.rank, failure.action) == (Ended.DIED, 1, "nap")
    assert "SIGKILL" in failure.cause
    assert 0.2 < failure.seconds < LIMIT_S
    (peer,) = failure.peers
    assert (peer.rank, peer.action) == (0, "wait_for_peer")
    assert peer.waits_for == "rank 1 (recv 3F0)"
    assert "hang_in_python" in peer.stack
    assert "rank 0 was in `wait_for_peer`" in str(failure)
    assert failure_of(killed) == failure
    assert not any(alive(pid) for pid in pair.pids), "a group ends as a whole"
    with pytest.raises(WorkerError, match="SIGKILL"):
        pair.submit(0, "back")


def test_a_peer_that_cleans_up_after_an_error_is_told_with_that(pair, tmp_path):
    cleaning = pair.submit(0, "clean_up_for_ever", tmp_path / "cleans")
    assert until((tmp_path / "cleans").exists)
    os.kill(pair.pids[1], signal.SIGKILL)
    failure = failure_of(cleaning, limit_s=10.0)
    assert failure.peers[0].handles == "RuntimeError: rank 1 closed its connection"
    told = next(line for line in str(failure).splitlines() if line.startswith("  meanwhile rank 0 was in "))
    assert told.endswith(", handling RuntimeError: rank 1 closed its connection")


def test_death_while_idle_is_found_at_the_next_use(pair):
    assert pair.submit([0, 1], "back", 1).result(LIMIT_S) == [1, 1]
    os.kill(pair.pids[0], signal.SIGKILL)
    assert all(gone(pid) for pid in pair.pids)
    with pytest.raises(WorkerError, match="rank 0 was killed by SIGKILL"):
        pair.submit(1, "back")


def test_exit_code_and_last_output(pair, tmp_path):
    failure = failure_of(pair.submit([0, 1], "exit_hard", 3), limit_s=10.0)
    assert failure.ended is Ended.DIED
    assert "exit code 3" in failure.cause
    assert failure.output == "about to leave"
    assert failure.output_file == str(tmp_path / "workers" / f"rank{failure.rank}.log")
    assert "about to leave" in str(failure)


def test_a_crash_in_c_brings_its_python_stack(pair):
    failure = failure_of(pair.submit(1, "crash"), limit_s=10.0)
    assert "SIGSEGV" in failure.cause
    assert "workers.py" in failure.traceback
    assert "in crash" in failure.traceback


def test_what_a_rank_answered_before_it_died_is_kept(pair):
    answered = pair.submit(1, "back", "here")
    failure_of(pair.submit(1, "kill_self"), limit_s=10.0)
    assert answered.result(0.0) == "here"


def test_the_cause_is_the_death_not_the_exception_that_it_made_in_a_peer():
    with LocalProcesses().start(Summing, 2) as group:
        assert group.submit([0, 1], "sum", 1).result(LIMIT_S) == [2.0, 2.0]
        summing = group.submit(0, "sum", 1, times=10**9)
        group.submit(1, "die")
        failure = failure_of(summing, limit_s=10.0)
        assert (failure.ended, failure.rank, failure.action) == (Ended.DIED, 1, "die")
        (peer,) = failure.peers
        assert (peer.rank, peer.action) == (0, "sum")


def test_an_exception_is_held_back_for_the_death_that_may_have_caused_it(pair, monkeypatch):
    monkeypatch.setattr(monitor, "SETTLE_S", 20.0)
    pair.submit(1, "nap", 0.2)
    pair.submit(1, "kill_self")
    failure = failure_of(pair.submit(0, "fail", "peer lost"))
    assert (failure.ended, failure.rank, failure.action) == (Ended.DIED, 1, "kill_self")
    (peer,) = failure.peers
    assert (peer.rank, peer.action, peer.raised) == (0, "fail", "KeyError: 'peer lost'")


# -- freeze


@pytest.mark.slow
@pytest.mark.parametrize("by", ["itself", "controller"])
def test_a_stopped_process_is_found_by_its_silence(by, tmp_path):
    with LocalProcesses(watch=Watch(FREEZE_S)).start(Echo, 2) as group:
        waiting = waiter(group, 0, 1, tmp_path)
        if by == "itself":
            action = "stop_self"
            group.submit(1, action)
        else:
            action = "hang_in_python"
            group.submit(1, action)
            group.submit(0, "back")
            time.sleep(0.2)
            os.kill(group.pids[1], signal.SIGSTOP)
        failure = failure_of(waiting, limit_s=FREEZE_S + 20.0)
        assert (failure.ended, failure.rank, failure.action) == (Ended.FROZEN, 1, action)
        assert "stopped by a signal" in failure.cause
        assert f"in {action}" in failure.traceback, "it is woken for a moment to say where it was"
        assert failure.seconds >= FREEZE_S * 0.8
        assert [peer.waits_for for peer in failure.peers] == ["rank 1 (recv 3F0)"]
        assert not any(alive(pid) for pid in group.pids)


def test_a_long_action_is_no_freeze():
    with LocalProcesses(watch=Watch(FREEZE_S)).start(Echo, 1) as group:
        assert group.submit(0, "nap", 1.4 * FREEZE_S).result(LIMIT_S)


def test_sending_to_a_stopped_process_does_not_block():
    with LocalProcesses(watch=Watch(FREEZE_S / 2)).start(Echo, 1) as group:
        os.kill(group.pids[0], signal.SIGSTOP)
        handle = group.submit(0, "back", bytes(20_000_000))
        assert failure_of(handle, limit_s=FREEZE_S + 20.0).ended is Ended.FROZEN


@pytest.mark.slow
def test_a_machine_that_was_held_up_does_not_take_that_for_silence():
    with LocalProcesses(watch=Watch(FREEZE_S)).start(Echo, 1) as group:
        with group._monitor.changed:  # controller and worker alike stand still
            os.kill(group.pids[0], signal.SIGSTOP)
            time.sleep(1.2 * FREEZE_S)
        time.sleep(0.2)
        os.kill(group.pids[0], signal.SIGCONT)
        assert group.submit(0, "back", 1).result(LIMIT_S) == 1


# -- exceptions and deadlines


def test_an_exception_interrupts_who_waits_for_another_rank_once(pair):
    waiting = pair.submit(0, "nap", 1.0)
    failed = pair.submit(1, "fail", "lost")
    failure = failure_of(waiting)
    assert (failure.ended, failure.rank, failure.action) == (Ended.RAISED, 1, "fail")
    assert [(peer.rank, peer.action) for peer in failure.peers] == [(0, "nap")]
    assert "nap" in failure.peers[0].stack
    assert waiting.result(LIMIT_S), "told once, then it may be waited for"
    assert failure_of(failed) == failure


def test_one_rank_of_several_that_raises_fails_the_handle_at_once(pair, tmp_path):
    waiter(pair, 0, 1, tmp_path)
    failure = failure_of(pair.submit([0, 1], "fail", "not today"))
    assert (failure.rank, failure.action) == (1, "fail")
    (peer,) = failure.peers
    assert (peer.action, peer.waits_for) == ("wait_for_peer", "rank 1 (recv 3F0)")
    assert "not today" in str(failure)
    pair.close(grace_s=0.1)


def test_a_deadline_says_where_the_action_is_and_leaves_it_running(pair):
    napping, behind = pair.submit(0, "nap", 1.0), pair.submit(0, "back", 4)
    failure = failure_of(napping, limit_s=0.3)
    assert (failure.ended, failure.rank, failure.action) == (Ended.LATE, 0, "nap")
    assert "0.3 s" in failure.cause
    # In its own words, or, if it is slow to say so, in those of the interpreter's fault handler.
    assert "in nap" in failure.traceback
    assert "`back` waits behind it" in failure_of(behind, limit_s=0.0).cause
    assert behind.result(LIMIT_S) == 4
    assert napping.result(0.0)
    with pytest.raises(AssertionError, match="deadline"):
        napping.result(float("inf"))


def test_sys_exit_and_results_that_cannot_be_sent_are_exceptions(pair):
    assert "SystemExit: 7" in failure_of(pair.submit(0, "leave")).cause
    assert "pickle" in failure_of(pair.submit(0, "unsendable")).cause
    assert pair.submit(0, "back", 1).result(LIMIT_S) == 1


def test_a_start_that_fails_or_is_late_leaves_nothing():
    LocalProcesses().start(Echo, 1).close()  # the first worker of all starts what tests fork theirs from (`tests.warm`)
    before = children()
    with pytest.raises(WorkerError, match="cannot be built"):
        LocalProcesses().start(Unbuildable, 2)
    with pytest.raises(WorkerError, match=r"in `start`"):
        LocalProcesses().start(Echo, 2, deadline_s=0.0)
    assert children() == before


# -- overlap, environment, output


def test_disjoint_ranks_run_at_the_same_time(pair):
    first, second = pair.submit(0, "interval", 0.3), pair.submit(1, "interval", 0.3)
    (start0, end0), (start1, end1) = first.result(LIMIT_S), second.result(LIMIT_S)
    assert max(start0, start1) < min(end0, end1)


def test_the_first_to_be_done_is_waited_for(pair):
    slow, quick = pair.submit(0, "nap", 1.0), pair.submit(1, "back", 1)
    assert pair.wait([slow, quick], LIMIT_S) == [quick]
    pair.close(grace_s=0.1)


def test_threads_environment_and_output(tmp_path):
    launcher = LocalProcesses(threads=3, output_dir=tmp_path, environment={"ANSWER": "42"})
    with launcher.start(Echo, 1) as group:
        seen = [group.submit(0, "environment", name).result(LIMIT_S) for name in ("OMP_NUM_THREADS", "ANSWER")]
        assert seen == ["3", "42"]
        group.submit(0, "say", "hello").result(LIMIT_S)
        assert (tmp_path / "rank0.log").read_text() == "hello\n"


def test_bytes_are_counted(pair):
    sent, received = pair.bytes_sent, pair.bytes_received
    pair.submit(0, "back", bytes(100_000)).result(LIMIT_S)
    assert 100_000 < pair.bytes_sent - sent < 101_000
    assert 100_000 < pair.bytes_received - received < 110_000


def test_a_call_from_several_threads(pair):
    answers = {}

    def ask(number):
        answers[number] = [pair.submit(number % 2, "back", (number, i)).result(LIMIT_S) for i in range(20)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=LIMIT_S)
    assert answers == {number: [(number, i) for i in range(20)] for number in range(4)}


# -- nothing is left


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return sorted(file.read().split())


def open_fds():
    return sorted(os.listdir("/proc/self/fd"))


def test_close_ends_a_worker_that_ignores_sigterm_and_hangs_and_what_it_started(tmp_path):
    fds, threads = open_fds(), threading.active_count()
    group = LocalProcesses().start(Echo, 1)
    group.submit(0, "ignore_sigterm").result(LIMIT_S)
    pending = group.submit(0, "spawn_and_hang", str(tmp_path / "pids"))
    assert until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().endswith("\n"))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    group.close(grace_s=0.1)
    assert all(gone(pid) for pid in pids)
    assert failure_of(pending).ended is Ended.CLOSED
    assert open_fds() == fds
    assert threading.active_count() == threads


def test_an_exception_of_the_controller_ends_the_workers():
    def use_and_fail():
        with LocalProcesses().start(Echo, 2) as group:
            group.submit([0, 1], "hang_in_python")
            pids.extend(group.pids)
            raise ZeroDivisionError

    pids = []
    with pytest.raises(ZeroDivisionError):
        use_and_fail()
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)


SCRIPT = """
import os, signal, sys, time
from plait.launch.local import LocalProcesses
from tests.launch.workers import Echo

FOLDER, HOW = sys.argv[1:]  # also where a worker imports it

class Point:
    def __init__(self, x):
        self.x = x

class OfTheScript(Echo):
    def moved(self, point):
        return Point(point.x + 1)

    def rendezvous(self):
        self.context.store().set("there", "1")

if __name__ == "__main__":
    group = LocalProcesses().start(OfTheScript, 2)
    assert isinstance(group.submit(0, "moved", Point(1)).result(60.0), Point)
    if HOW == "killed":
        group.submit(0, "rendezvous").result(60.0)
    for rank in range(2):
        group.submit(rank, "spawn_and_hang", f"{FOLDER}/pids{rank}")
    if HOW != "killed":
        files = [f"{FOLDER}/pids{rank}" for rank in range(2)]
        while not all(os.path.exists(file) and open(file).read().endswith("\\n") for file in files):
            time.sleep(0.01)
    if HOW == "stopped":
        os.kill(group.pids[1], signal.SIGSTOP)
    print(*group.pids, flush=True)
    if HOW == "left open":
        sys.exit(4)
    time.sleep(1000)
"""


@pytest.mark.parametrize("how", ["killed", "stopped", "left open"])
def test_nothing_is_left_of_a_controller_that_ends(tmp_path, how):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "tmp").mkdir()
    controller = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path), how],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path / "tmp")},
    )
    try:
        workers = [int(pid) for pid in controller.stdout.readline().split()]
        files = [tmp_path / "pids0", tmp_path / "pids1"]
        assert until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert set(workers) < set(pids)
        if how != "left open":
            assert all(alive(pid) for pid in pids)
            controller.kill()
        assert controller.wait(timeout=LIMIT_S) == (4 if how == "left open" else -signal.SIGKILL)
    finally:
        controller.kill()
        controller.wait()
        controller.stdout.close()
    assert all(gone(pid) for pid in pids)
    assert os.listdir(tmp_path / "tmp") == []

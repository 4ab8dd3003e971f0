"""Groups over several nodes: what each loss looks like, that nothing is left, and what listens where."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.errors import ConfigError, RunError
from plait.launch import monitor
from plait.launch.failures import Ended, NodeLost, WorkerError
from plait.launch.local import LocalProcesses
from plait.launch.nodes.agent import BEAT_S, TICK_S
from plait.launch.nodes.gathered import Gathered
from plait.launch.nodes.gathering import NodeRendezvous
from plait.launch.nodes.introduction import Stranger, dialled, introduced, listening
from plait.launch.watch import Watch
from tests.launch.nodes.agents import KEY, agent, end, joined, me
from tests.launch.test_strangers import listened_on
from tests.launch.workers import Echo, Summing, waiter
from tests.memory_groups import bounded
from tests.processes import gone

LIMIT_S = 60.0
HOST = os.uname().nodename


def stop(pid: int) -> None:
    """Stop a process, all its threads."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + LIMIT_S
    threads = Path(f"/proc/{pid}/task")
    while any(path.read_text().rpartition(")")[2].split()[0] != "T" for path in threads.glob("*/stat")):
        assert time.monotonic() < until, "it goes on"
        time.sleep(0.01)


def failure_of(group, handle, rank):
    with pytest.raises(WorkerError) as caught:
        handle.result(LIMIT_S)
    failure = caught.value.failure
    assert (failure.ended, failure.rank) == (Ended.DIED, rank), str(failure)
    assert failure.node == f"node 1 ({HOST})"
    assert all(gone(pid) for pid in group.pids)
    return str(caught.value)


def test_a_dead_worker_of_another_node_is_named_with_its_cause_and_its_output(tmp_path) -> None:
    with joined(2) as (gathered, _), LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group:
        handle = waiter(group, 0, 1, tmp_path)
        text = failure_of(group, group.submit(1, "exit_hard", 9), 1)
        assert f"rank 1 on node 1 ({HOST}) ended its process (exit code 9) in `exit_hard`" in text
        assert f"meanwhile rank 0 on node 0 ({HOST}) was in `wait_for_peer`" in text
        assert "waiting for rank 1 (recv 3F0)" in text
        assert "about to leave" in text, "its output comes from its node"
        del handle


def test_a_frozen_worker_of_another_node_is_named_with_where_it_was() -> None:
    with (
        joined(2) as (gathered, _),
        LocalProcesses(nodes=gathered.nodes, watch=Watch(1.0)).start(Echo, 2) as group,
    ):
        handle = group.submit(1, "stop_self")
        with pytest.raises(WorkerError) as caught:
            handle.result(LIMIT_S)
        failure = caught.value.failure
        assert (failure.ended, failure.rank, failure.node) == (Ended.FROZEN, 1, f"node 1 ({HOST})")
        assert "it is stopped by a signal" in failure.cause
        assert "stop_self" in failure.traceback
        assert all(gone(pid) for pid in group.pids)


def test_an_exception_is_told_at_once_where_all_others_have_outlived_it(monkeypatch) -> None:
    """And else held back for the death that may be its cause, which is seen later."""
    monkeypatch.setattr(monitor, "NODES_SETTLE_S", LIMIT_S)
    with joined(2) as (gathered, _), LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group:
        with pytest.raises(WorkerError, match="no such key") as caught:
            group.submit(0, "fail", "no such key").result(LIMIT_S / 2)
        assert caught.value.failure.ended is Ended.RAISED
        stop(group.pids[1])
        handle = group.submit(0, "fail", "peer lost")
        time.sleep(2 * monitor.SETTLE_S)
        assert not handle.done
        os.kill(group.pids[1], signal.SIGKILL)
        assert "KeyError: 'peer lost'" in failure_of(group, handle, 1)


def test_a_rank_that_the_kernel_ends_for_want_of_memory_is_named_with_the_limit() -> None:
    with (
        bounded(300 << 20) as group_of_memory,
        joined(2, group=group_of_memory) as (gathered, _),
        LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group,
    ):
        text = failure_of(group, group.submit(1, "hoard"), 1)
        assert (
            f"rank 1 on node 1 ({HOST}) was killed by SIGKILL, out of memory: the kernel has ended 1 process for it; "
            "0.29 GiB is all that its control group has in `hoard`"
        ) in text
        assert gathered.nodes[1].name == f"node 1 ({HOST})", "the node itself is there"


@pytest.mark.slow
def test_what_a_lost_node_had_of_memory_is_said_where_it_was_nearly_all() -> None:
    with (
        bounded(400 << 20) as group_of_memory,
        joined(2, group=group_of_memory) as (gathered, agents),
        LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group,
    ):
        handle = group.submit(1, "hold", 350 << 20)
        handle.result(LIMIT_S)
        time.sleep(2 * BEAT_S + TICK_S)  # it is said every second
        agents[0].kill()
        text = failure_of(group, group.submit(1, "hang_in_python"), 1)
        assert re.search(r"is lost with its node: .*; its memory was \d\d% full at the last report", text), text
        assert "of 0.39 GiB" in text


@pytest.mark.slow
def test_a_group_begins_again_on_the_nodes_that_are_left() -> None:
    """Three nodes: 1 is lost, with the group; the others start another, of other ranks, on the same connections."""
    with joined(3) as (gathered, agents):
        with LocalProcesses(nodes=gathered.nodes).start(Echo, 3) as group:
            handle = group.submit([0, 1, 2], "hang_in_python")
            agents[0].kill()
            assert f"rank 1 on node 1 ({HOST}) is lost with its node" in failure_of(group, handle, 1)
        with pytest.raises(NodeLost, match=r"^node 1 \(.*\) is lost: its connection was closed"):
            LocalProcesses(nodes=gathered.nodes).start(Echo, 3)
        gathered.drop_lost()
        gathered.tell("node 0: it begins again")
        for _ in range(3):
            assert [node.node for node in gathered.nodes] == [0, 2]
            with LocalProcesses(nodes=gathered.nodes).start(Echo, 4) as group:
                assert group.submit([0, 1, 2, 3], "back", 7).result(LIMIT_S) == [7] * 4
                block = os.urandom(3_000_000)
                assert group.submit(3, "back", block).result(LIMIT_S) == block
        gathered.end(0)
        assert "node 0: it begins again" in agents[1].communicate(timeout=LIMIT_S)[0]


def test_of_machines_with_several_commands_equally_many_go_on() -> None:
    here = [SimpleNamespace(joined=SimpleNamespace(task=task), node=node, gone="") for task, node in SIX]
    three = Gathered(here, None)  # pyright: ignore[reportArgumentType]
    assert [link.node for link in three.nodes] == [0, 0, 1, 1, 2, 2]
    here[3].gone = "its connection was closed"
    assert [link.node for link in three.nodes] == [0, 0, 1, 1, 2, 2], "whoever counts on it is told that it is lost"
    three.drop_lost()
    assert [link.node for link in three.nodes] == [0, 0, 2, 2], "four of whole machines, not three of each one"
    here[5].gone = here[1].gone = "its connection was closed"
    three.drop_lost()
    assert [link.node for link in three.nodes] == [0, 1, 2]
    assert three.num_joined == 6


SIX = [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)]
"""(number of the command, machine)."""


def test_a_node_whose_process_dies_is_named_and_its_ranks_are_gone() -> None:
    with joined(3) as (gathered, agents), LocalProcesses(nodes=gathered.nodes).start(Echo, 3) as group:
        handle = group.submit([0, 1, 2], "hang_in_python")
        started = time.monotonic()
        agents[0].kill()
        text = failure_of(group, handle, 1)
        assert time.monotonic() - started < 10
        assert f"rank 1 on node 1 ({HOST}) is lost with its node: its connection was closed" in text
        assert [link.name for link in gathered.links] == [f"node 2 ({HOST})"], "the others stay for another group"
        gathered.drop_lost()
        with LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as smaller:
            assert smaller.submit([0, 1], "back", 7).result(LIMIT_S) == [7, 7]


def test_a_node_that_is_silent_counts_as_lost_and_ends_its_ranks_by_itself() -> None:
    with (
        joined(2, silent_after_s=2.0) as (gathered, (process,)),
        LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group,
    ):
        handle = group.submit([0, 1], "hang_in_python")
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(
                WorkerError, match=r"nothing was received from it for 2 s \(the network is down, or it is frozen\)"
            ):
                handle.result(LIMIT_S)
            assert gone(group.pids[0])
            assert gone(group.pids[1]), "it has ended by itself, though who started it is stopped"
        finally:
            process.send_signal(signal.SIGCONT)
        assert process.wait(LIMIT_S) == 1, "it has heard nothing of its leader either"
        assert "the leader is lost" in process.communicate()[0]


def test_a_node_whose_leader_dies_ends_its_ranks_and_itself(tmp_path: Path) -> None:
    script = tmp_path / "leads.py"
    script.write_text(
        "import sys, time\n"
        "from tests.launch.nodes.agents import joined\n"
        "from tests.launch.workers import Echo\n"
        "from plait.launch.local import LocalProcesses\n"
        "if __name__ == '__main__':\n"
        "    with joined(2) as (gathered, agents), LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group:\n"
        "        print(*group.pids, agents[0].pid, flush=True)\n"
        "        time.sleep(100)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    leader = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    assert leader.stdout is not None
    pids = [int(word) for word in leader.stdout.readline().split()]
    assert len(pids) == 3
    leader.kill()
    leader.communicate()
    assert all(gone(pid) for pid in pids)


def test_nothing_listens_that_was_not_asked_for() -> None:
    """The leader, until all have come; then nobody, but for what gloo opens on the interface that was named."""
    listener = listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    assert listened_on([os.getpid()]) == [("0100007F", port)]
    process = agent(port, 1)
    try:
        gathered = NodeRendezvous(listener, KEY, [1], me()).wait(None)
        everyone = [os.getpid(), process.pid]
        assert listened_on(everyone) == []
        with LocalProcesses(nodes=gathered.nodes).start(Summing, 2) as group:
            assert group.submit([0, 1], "sum", 2).result(LIMIT_S) == [4.0, 4.0]
            assert listened_on(everyone) == []
            assert {address for address, _ in listened_on(group.pids)} == {"0100007F"}
        gathered.end(0)
        assert process.wait(LIMIT_S) == 0
    finally:
        end(process)


def test_strangers_and_other_keys_do_not_join_and_hold_up_nobody() -> None:
    listener = listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with contextlib.ExitStack() as stack:
        for word in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(word)
        other = agent(port, 1, key=bytes(32))
        right = agent(port, 1)
        for process in (other, right):
            stack.callback(end, process)
        gathered = NodeRendezvous(listener, KEY, [1], me()).wait(None, deadline_s=LIMIT_S)
        assert [link.joined.pid for link in gathered.links] == [right.pid]
        gathered.end(3)
        assert right.wait(LIMIT_S) == 3, "the exit code that the leader gives"
        assert other.wait(LIMIT_S) == 1


def test_a_leader_that_is_none_gets_no_word_of_the_key() -> None:
    listener = listening("127.0.0.1", 0)
    with listener, dialled(listener.getsockname(), time.monotonic() + 5) as link:
        theirs, _ = listener.accept()
        with theirs:
            theirs.sendall(b"SSH-2.0-something else entirely\n")
            with pytest.raises(Stranger, match="it is not the leader of a run of this version of plait"):
                introduced(link, KEY)


def test_nodes_that_do_not_come_are_counted() -> None:
    listener = listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    process = agent(port, 2)
    try:
        assert select.select([listener], [], [], LIMIT_S)[0], "one comes"
        with pytest.raises(RunError) as caught:
            NodeRendezvous(listener, KEY, [1, 2], me()).wait(None, deadline_s=1.0)
        assert f"expected 2 more commands of this run to join at 127.0.0.1:{port}; not there after 1 s" in str(
            caught.value
        )
        assert f"number 1 has not come, joined: node 2 ({HOST}). Are they" in str(caught.value)
        assert process.wait(LIMIT_S) == 1
    finally:
        assert "node 0: expected 2 more commands of this run" in end(process)


def test_a_signal_to_one_that_has_come_while_others_are_waited_for_ends_the_wait() -> None:
    """It is told, and leaves with the code of an interrupted command, as the leader does."""
    listener = listening("127.0.0.1", 0)
    process = agent(listener.getsockname()[1], 2)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        process.send_signal(signal.SIGINT)

    def wished() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            NodeRendezvous(listener, KEY, [1, 2], me(), told=tell, wished=wished).wait(None, deadline_s=LIMIT_S)
        assert told == [f"node 2 ({HOST}) has joined (1 of 2)"]
        text = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == 130
        assert "node 0 is asked to stop the run" in text
        assert text.splitlines()[-1] == "node 0: interrupted"
    finally:
        end(process)


def test_who_has_another_key_is_named_by_its_address() -> None:
    listener = listening("127.0.0.1", 0)
    process = agent(listener.getsockname()[1], 1, key=bytes(32))
    try:
        assert select.select([listener], [], [], LIMIT_S)[0], "it comes"
        with pytest.raises(
            RunError, match=r"joined: none; turned away: 127\.0\.0\.1 \(it has another key\)\. Are they"
        ):
            NodeRendezvous(listener, KEY, [1], me()).wait(None, deadline_s=1.0)
    finally:
        end(process)


class OfAnotherVersion:
    """Pickled so that nobody can read it."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


def test_who_says_what_this_version_cannot_read_is_turned_away() -> None:
    listener = listening("127.0.0.1", 0)
    closed: list[bytes] = []

    def join() -> None:
        channel, _ = introduced(dialled(listener.getsockname(), time.monotonic() + LIMIT_S), KEY)
        channel.put(OfAnotherVersion())
        channel.link.settimeout(LIMIT_S)
        closed.append(channel.link.recv(1))

    other = threading.Thread(target=join)
    other.start()
    with pytest.raises(RunError, match=r"turned away: 127\.0\.0\.1 \(it runs another version of plait: ValueError"):
        NodeRendezvous(listener, KEY, [1], me()).wait(None, deadline_s=2.0)
    other.join(LIMIT_S)
    assert closed == [b""]


def test_a_command_that_is_given_twice_is_told_so_and_the_first_stays() -> None:
    listener = listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    first = agent(port, 1)
    processes = [first]

    def again_and_then_another() -> None:
        processes.append(agent(port, 1))
        processes[1].wait(LIMIT_S)
        processes.append(agent(port, 2))

    others = threading.Thread(target=again_and_then_another)

    def told(text: str) -> None:
        if not others.ident:
            others.start()

    try:
        gathered = NodeRendezvous(listener, KEY, [1, 2], me(), told=told).wait(None, deadline_s=LIMIT_S)
        others.join(LIMIT_S)
        assert gathered.links[0].joined.pid == first.pid
        assert processes[1].wait(LIMIT_S) == 2
        assert "says that it is number 1 of the run, but it is node 1" in processes[1].communicate()[0]
        gathered.end(0)
        assert [process.wait(LIMIT_S) for process in (first, processes[2])] == [0, 0]
    finally:
        for process in processes:
            end(process)


def test_another_recipe_is_said_on_both_sides() -> None:
    listener = listening("127.0.0.1", 0)
    theirs = (("steps", "5"), ("seed", "0"))
    process, said = agent(listener.getsockname()[1], 1, keys=theirs), []
    try:
        ours = replace(me(), keys=(("steps", "8"), ("seed", "0")))
        NodeRendezvous(listener, KEY, [1], ours, told=said.append).wait(None, deadline_s=LIMIT_S).end(0)
        text = f"node 1 ({HOST}) was started with another recipe than node 0 ({HOST}), whose is used: `steps` 8, not 5"
        assert text in said[1]
        assert process.wait(LIMIT_S) == 0
        assert text in process.communicate()[0]
    finally:
        end(process)


TORCHLESS = tuple((what, "0.1" if what == "torch" else version) for what, version in me().versions)


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        ({"versions": TORCHLESS}, r"node 1 .* has torch .*, node 0 .* has 0.1; install the same"),
        (
            {"files": (("`model` /m", "1"), ("`algorithm` /f.py:grpo", "3"), ("`model` /elsewhere", "4"))},
            r"^node 1 \(.*\) and node 0 \(.*\) have different files under `algorithm` /f.py:grpo; copy the same to",
        ),
    ],
    ids=["a version", "a file"],
)
def test_what_must_be_equal_and_is_not_is_refused_on_both_sides(ours: dict[str, Any], says: str) -> None:
    listener = listening("127.0.0.1", 0)
    process = agent(listener.getsockname()[1], 1, files=(("`model` /m", "1"), ("`algorithm` /f.py:grpo", "2")))
    try:
        with pytest.raises(ConfigError, match=says):
            NodeRendezvous(listener, KEY, [1], replace(me(), **ours)).wait(None, deadline_s=LIMIT_S)
        assert process.wait(LIMIT_S) == 2
    finally:
        end(process)


def test_a_folder_that_is_not_shared_is_found(tmp_path: Path) -> None:
    with joined(2) as (gathered, _):
        gathered.check_folder(tmp_path)
        assert not list(tmp_path.iterdir()), "nothing is left of the check"
        with pytest.raises(ConfigError, match=r"is not shared by all nodes: on node 1 .* it cannot be written there"):
            gathered.check_folder(tmp_path / "not there")


def test_what_messages_between_nodes_take_is_measured() -> None:
    with joined(2) as (gathered, _):
        found = gathered.reach()
        assert found is not None
        assert found.bytes_per_s > 1e6
        assert 0 < found.latency_s < 1
        assert gathered.least_memory is not None


def test_unequal_nodes_are_refused() -> None:
    listener = listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    processes = [agent(port, task, node) for task, node in ((1, 0), (2, 0), (3, 1))]
    try:
        with pytest.raises(ConfigError, match="found 2 on node 0, 1 on node 1"):
            NodeRendezvous(listener, KEY, [1, 2, 3], me()).wait(None, deadline_s=LIMIT_S)
        assert [process.wait(LIMIT_S) for process in processes] == [2, 2, 2]
    finally:
        for process in processes:
            end(process)

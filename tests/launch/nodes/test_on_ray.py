"""Nodes that Ray starts: what is said where there is no room, what each loss looks like, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from plait.errors import ConfigError, RunError
from plait.launch.failures import Ended, WorkerError
from plait.launch.local import LocalProcesses
from plait.launch.nodes.on_ray import started_by_ray
from plait.launch.nodes.room import Need
from tests.launch.nodes.agents import KEY
from tests.launch.nodes.ray_nodes import CORES, NODES, addressed, cluster_address, placed_by_ray
from tests.launch.workers import Echo
from tests.processes import gone

LIMIT_S = 60.0
HOST = os.uname().nodename


def test_without_the_package_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(ConfigError, match=r"needs the package ray; install it with `pip install plait\[ray\]`"),
        started_by_ray(Need(2, {"CPU": 1.0}), KEY, silent_after_s=15.0, say=print),
    ):
        pass


@pytest.mark.slow
def test_room_that_is_taken_is_waited_for_to_a_deadline_and_shown() -> None:
    with placed_by_ray(nodes=NODES, num_ranks=NODES * CORES):
        started = time.monotonic()
        with pytest.raises(RunError) as caught, placed_by_ray(nodes=2, num_ranks=2, placed_s=1.0):
            pass
        assert time.monotonic() - started < 10
        said, needed, head, *nodes = str(caught.value).splitlines()
        assert "Ray has found no room within 1 s" in said
        assert needed == "needed: 2 ranks, each with 1 CPU; 1 CPU on each of 2 nodes"
        assert head.split() == ["node", "CPU", "free", "of"]
        assert [re.sub(r"\(\w+\)", "()", line).split() for line in nodes] == [[HOST, "()", "0", str(CORES)]] * NODES
    with placed_by_ray(nodes=2, num_ranks=2, placed_s=LIMIT_S) as gathered:
        assert gathered.num_nodes == 2, "the room was given back"


@pytest.mark.slow
def test_room_that_cannot_be_is_not_waited_for() -> None:
    started = time.monotonic()
    with (
        pytest.raises(ConfigError, match="could not hold the ranks"),
        placed_by_ray(nodes=NODES + 1, num_ranks=NODES + 1),
    ):
        pass
    with pytest.raises(ConfigError, match="could not hold the ranks"), placed_by_ray(nodes=0, num_ranks=10 * CORES):
        pass
    assert time.monotonic() - started < 10


@pytest.mark.slow
def test_a_dead_worker_is_named_with_its_cause_and_its_output() -> None:
    with placed_by_ray(nodes=2) as gathered, LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group:
        group.submit(0, "hang_in_python")
        with pytest.raises(WorkerError) as caught:
            group.submit(1, "exit_hard", 9).result(LIMIT_S)
        failure = caught.value.failure
        assert (failure.ended, failure.rank, failure.node) == (Ended.DIED, 1, f"node 1 ({HOST})")
        assert "ended its process (exit code 9) in `exit_hard`" in str(caught.value)
        assert "about to leave" in str(caught.value), "its output comes from its node"
        assert all(gone(pid) for pid in group.pids)


@pytest.mark.slow
def test_ranks_have_the_priority_of_any_command() -> None:
    with placed_by_ray(nodes=2) as gathered, LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group:
        assert group.submit([0, 1], "niceness").result(LIMIT_S) == [os.nice(0)] * 2, "Ray gives its workers 15"


@pytest.mark.slow
def test_an_actor_that_dies_is_a_lost_node_and_ray_says_why() -> None:
    with placed_by_ray(nodes=2) as gathered, LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group:
        handle = group.submit([0, 1], "hang_in_python")
        (second,) = (link for link in gathered.links if link.node == 1)  # they are in the order in which they came
        os.kill(second.joined.pid, signal.SIGKILL)
        with pytest.raises(WorkerError) as caught:
            handle.result(LIMIT_S)
        assert caught.value.failure.rank == 1
        assert f"rank 1 on node 1 ({HOST}) is lost with its node: its connection was closed" in str(caught.value)
        assert "Ray says: ActorDiedError" in str(caught.value)
        assert all(gone(pid) for pid in group.pids)


@pytest.mark.slow
def test_the_actors_their_ranks_and_the_room_go_with_a_leader_that_is_killed() -> None:
    script = (
        "import time\n"
        "from tests.launch.nodes.ray_nodes import KEY\n"
        "from tests.launch.workers import Echo\n"
        "from plait.launch.local import LocalProcesses\n"
        "from plait.launch.nodes.on_ray import started_by_ray\n"
        "from plait.launch.nodes.room import Need\n"
        f"need = Need({2 * CORES}, {{'CPU': 1.0}}, 2)\n"
        "with started_by_ray(need, KEY, silent_after_s=15.0, say=lambda text: None) as gathered:\n"
        "    with LocalProcesses(nodes=gathered.nodes).start(Echo, 2) as group:\n"
        "        print(*group.pids, *(link.joined.pid for link in gathered.links), flush=True)\n"
        "        time.sleep(100)\n"
    )
    cluster_address()
    with addressed():
        leader = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert leader.stdout is not None
    pids = [int(word) for word in leader.stdout.readline().split()]
    leader.kill()
    leader.communicate()
    assert len(pids) == 4
    assert all(gone(pid, 30.0) for pid in pids)
    with placed_by_ray(nodes=2, num_ranks=2 * CORES, placed_s=LIMIT_S) as gathered:
        assert gathered.num_nodes == 2, "the room was given back"

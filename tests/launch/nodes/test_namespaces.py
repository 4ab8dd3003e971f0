"""Two machines made of network namespaces, joined by a link of limited bandwidth: a group over it, what listens there,
and a link that is cut. Skipped where namespaces may not be made."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.nodes.namespaces import cut, inside, listening_in
from tests.launch.nodes.namespaces import machines as machines

LEADER = """
import sys, time
from plait.launch.failures import WorkerError
from plait.launch.local import LocalNode, LocalProcesses
from plait.launch.nodes.agent import who
from plait.launch.nodes.gathering import NodeRendezvous
from plait.launch.nodes.interfaces import interface_variables
from plait.launch.nodes.introduction import listening
from tests.launch.nodes.agents import KEY
from tests.launch.workers import Summing

if __name__ == "__main__":
    listener = listening("10.77.0.1", 4077)
    here = LocalNode("10.77.0.1", interface_variables("10.77.0.1", {}))
    me = who(0, 0, "10.77.0.1", own_devices=False)
    gathered = NodeRendezvous(listener, KEY, [1], me, silent_after_s=4.0).wait(here, deadline_s=60.0)
    with LocalProcesses(nodes=gathered.nodes).start(Summing, 2) as group:
        print("sum", *group.submit([0, 1], "sum", 3).result(60.0), flush=True)
        handle = group.submit([0, 1], "sum", 1, 10**9)
        sys.stdin.readline()
        started = time.monotonic()
        print("cutting", flush=True)
        try:
            handle.result(60.0)
        except WorkerError as error:
            print(f"after {time.monotonic() - started:.0f} s", str(error).splitlines()[0], flush=True)
"""
AGENT = """
import time
from plait.errors import RunError
from plait.launch.nodes.agent import who
from plait.launch.nodes.introduction import dialled, introduced
from plait.launch.nodes.joining import serve
from tests.launch.nodes.agents import KEY

channel, own = introduced(dialled(("10.77.0.1", 4077), time.monotonic() + 60), KEY)
try:
    serve(channel, own, who(1, 1, channel.link.getsockname()[0], own_devices=False), print)
except RunError as error:
    print(error)
"""


def in_machine(name: str, code: str, folder: Path) -> subprocess.Popen[str]:
    script = folder / f"{name}.py"
    script.write_text(code)
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    return subprocess.Popen(
        inside(name, sys.executable, str(script)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )


@pytest.mark.slow
def test_two_machines_sum_listen_where_they_were_told_and_find_a_cut(machines: list[str], tmp_path: Path) -> None:
    leader, agent = (in_machine(name, code, tmp_path) for name, code in zip(machines, (LEADER, AGENT), strict=True))
    try:
        assert leader.stdout is not None
        assert leader.stdin is not None
        assert leader.stdout.readline() == "sum 6.0 6.0\n"
        assert listening_in(machines[0]) == {"01004D0A"}, "gloo, on 10.77.0.1; the leader's own port is closed"
        assert listening_in(machines[1]) == {"02004D0A"}, "10.77.0.2"
        leader.stdin.write("\n")
        leader.stdin.flush()
        assert leader.stdout.readline() == "cutting\n"
        cut(machines)
        started = time.monotonic()
        told = leader.communicate(timeout=60)[0]
        assert time.monotonic() - started < 30
        assert "rank 1 on node 1" in told, told
        assert (
            "is lost with its node: nothing was received from it for 4 s (the network is down, or it is frozen)" in told
        )
        assert "the leader is lost" in agent.communicate(timeout=60)[0]
    finally:
        for process in (leader, agent):
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()

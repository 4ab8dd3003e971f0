"""Nodes of this machine: agents in processes of their own, which dial a leader on loopback."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from plait.launch.local import LocalNode
from plait.launch.nodes.agent import who
from plait.launch.nodes.gathering import NodeRendezvous
from plait.launch.nodes.introduction import listening
from tests.memory_groups import inside

KEY = bytes(range(32))
AGENT = """
import json, sys, time
from plait.errors import RunError
from plait.launch.nodes.introduction import dialled, introduced
from plait.launch.nodes.agent import who
from plait.launch.nodes.joining import serve

sys.path.insert(0, sys.argv[5])
port, task, node, key = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
said = {name: tuple(map(tuple, pairs)) for name, pairs in json.loads(sys.argv[6]).items()}
channel, own = introduced(dialled(("127.0.0.1", port), time.monotonic() + 30), key)
try:
    code = serve(channel, own, who(task, node, "127.0.0.1", own_devices=False, **said), print)
except RunError as error:
    print(error)
    code = 1
sys.exit(code)
"""


def agent(port, task, node=None, key=KEY, group=None, **said):
    """group: of bounded memory, that it is in; said: keys and files of the recipe that it was begun with."""
    node = task if node is None else node
    root = str(Path(__file__).parents[3])  # where ranks find the workers of tests
    arguments = ["-c", AGENT, str(port), str(task), str(node), key.hex(), root, json.dumps(said)]
    return subprocess.Popen(
        [sys.executable, *arguments] if group is None else inside(group, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process):
    """Kill it if it runs; what it printed, where nobody has read that."""
    process.kill()
    return "" if process.stdout.closed else process.communicate()[0]


def me():
    return who(0, 0, "127.0.0.1", own_devices=False)


@contextlib.contextmanager
def joined(num_nodes, *, own=True, silent_after_s=15.0, per_node=1, group=None):
    """(nodes that have been gathered, processes of the agents) while inside; the agents are gone after.

    group: of bounded memory, that all agents and their ranks are in
    """
    listener = listening("127.0.0.1", 0)
    port = listener.getsockname()[1]
    first = 1 if own else 0
    tasks = range(1, num_nodes * per_node + 1 - first)
    numbers = {task: (task - 1 + first) // per_node if own else task - 1 for task in tasks}
    agents = [agent(port, task, number, group=group) for task, number in numbers.items()]
    gathered = None
    try:
        place = LocalNode() if own else None
        gathered = NodeRendezvous(listener, KEY, tasks, me(), silent_after_s).wait(place, deadline_s=60.0)
        yield gathered, agents
    finally:
        if gathered is not None:
            gathered.end(0)
        for one in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(10)
            end(one)

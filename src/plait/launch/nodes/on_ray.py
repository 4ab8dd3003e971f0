"""Has Ray start the agents: one placement group with a bundle on each node, and in each bundle one actor.

Ray places processes and says why one ended; what ranks and leader say goes over the leader's own connections, so no row
and no weight passes Ray's object store. Nothing is started again behind the user's back: `max_restarts` is 0. Ray ends
the actors and gives the room back when the leader dies. Ray is imported when it is asked for.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from plait.errors import ConfigError, RunError
from plait.launch.nodes.agent import who
from plait.launch.nodes.gathered import Gathered
from plait.launch.nodes.gathering import JOIN_S, NodeRendezvous
from plait.launch.nodes.introduction import dialled, introduced, listening
from plait.launch.nodes.joining import serve
from plait.launch.nodes.messages import LEADS_ALONE
from plait.launch.nodes.room import Need, Rooms, node_counts, passed, table

PLACED_S = 60.0
"""For Ray to find room; then it is said who has what."""
_SAY_AFTER_S = 3.0
_END_S = 5.0
_CAUSE_CHARACTERS = 1500
_AS_ANY_COMMAND = {"RAY_worker_niceness": "0"}
"""Ray lowers the priority of its workers to 15, below that of all other processes of the node: a rank that others wait
for in each product would lose its core to any of them."""


@contextmanager
def started_by_ray(
    need: Need,
    key: bytes,
    *,
    silent_after_s: float,
    say: Callable[[str], None],
    placed_s: float = PLACED_S,
) -> Iterator[Gathered]:
    """Nodes of a Ray cluster while inside: of the one that runs, else of one that is started on this machine.

    Raises:
        ConfigError: ray is not installed or cannot be reached, or the nodes are too small even when idle.
        RunError: there was no room in time, or an agent could not be started; says what Ray says.
    """
    with ExitStack() as stack:
        ray = stack.enter_context(_cluster(need, say))
        group, count = stack.enter_context(_placed(ray, need, placed_s, say))
        address = ray.util.get_node_ip_address()
        listener = listening(address, 0)
        leader = (address, listener.getsockname()[1])
        say(f"Ray starts the ranks of {count} node{'s' * (count > 1)}; the leader listens at {address}:{leader[1]}")
        actors = _actors(ray, group, need.share(count), count)
        refs = {task: actor.serve.remote(leader, key, task) for task, actor in enumerate(actors, start=1)}
        stack.callback(_ended, ray, actors, list(refs.values()))

        def lost() -> str:
            for task, ref in refs.items():
                if why := _why(ray, ref, 0.0):
                    raise RunError(f"Ray could not start the ranks of node {task - 1}: {why}")
            return ""

        me = who(0, LEADS_ALONE, address, own_devices=True)
        gathered = NodeRendezvous(listener, key, list(refs), me, silent_after_s, say).wait(None, lost=lost)
        stack.callback(gathered.end, 1, "the leader has left")
        for link in gathered.links:
            link.explain = partial(_why, ray, refs[link.joined.task], _END_S)
        yield gathered


@contextmanager
def _cluster(need: Need, say: Callable[[str], None]) -> Iterator[Any]:
    """Ray, connected; let go again if it was connected here. Its handlers of signals are not kept."""
    try:
        import ray
    except ImportError:
        raise ConfigError("`launcher` ray needs the package ray; install it with `pip install plait[ray]`") from None
    if ray.is_initialized():
        yield ray
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _connect(ray, need, say)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, need: Need, say: Callable[[str], None]) -> None:
    """Connect to the cluster that runs; start one where none runs and none was named."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    named = os.environ.get("RAY_ADDRESS", "")
    if "://" in named:
        raise ConfigError(
            f"the variable RAY_ADDRESS: expected HOST:PORT of the cluster's head, found {named}; begin the command on "
            "a node of the cluster itself"
        )
    try:
        ray.init(address="auto", **quiet)
        say("connected to the Ray cluster that runs")
        return
    except ConnectionError as error:
        if named:
            raise ConfigError(f"the variable RAY_ADDRESS is {named}, but no Ray cluster answers there") from error
    except (RuntimeError, ValueError) as error:  # other versions of Ray or Python, a token that is missing
        raise ConfigError(f"cannot connect to the Ray cluster that runs: {error}") from error
    cores = max(need.num_ranks * need.per_rank.get("CPU", 0.0), os.cpu_count() or 1)
    try:
        ray.init(address="local", num_cpus=int(cores), include_dashboard=False, **quiet)
    except Exception as error:  # of many kinds, and at worst that its processes were too slow
        raise RunError(f"no Ray cluster runs, and Ray could not start one on this machine: {error}") from error
    say("no Ray cluster runs: one was started on this machine, for this run alone")


@contextmanager
def _placed(ray: Any, need: Need, seconds: float, say: Callable[[str], None]) -> Iterator[tuple[Any, int]]:
    """A placement group that has its room, and on how many nodes; given back at the end."""
    end, soon = time.monotonic() + seconds, min(_SAY_AFTER_S, seconds)
    now, ever = node_counts(need, _rooms(ray))
    for count in now[:-1]:  # what looks free may be used by tasks of which Ray does not say where they are
        with _bundles(need, count) as group:
            if group.wait(timeout_seconds=soon):
                yield group, count
                return
    count = (now or ever)[-1 if now else 0]
    with _bundles(need, count) as group:
        if not group.wait(timeout_seconds=soon):
            say(f"waiting for room in the Ray cluster, for {seconds:g} s at most\n{table(need, count, _rooms(ray))}")
            while not group.wait(timeout_seconds=min(1.0, max(0.0, end - time.monotonic()))):
                if time.monotonic() >= end:
                    raise RunError(
                        f"Ray has found no room within {seconds:g} s; wait until other jobs have ended, or give fewer "
                        f"`devices`\n{table(need, count, _rooms(ray))}"
                    )
        yield group, count


@contextmanager
def _bundles(need: Need, count: int) -> Iterator[Any]:
    """A placement group with a share of the ranks on each of so many nodes, which may have to wait; removed after."""
    from ray.util.placement_group import placement_group, remove_placement_group

    strategy = "STRICT_SPREAD" if count > 1 else "STRICT_PACK"
    group = placement_group([need.share(count) for _ in range(count)], strategy=strategy)
    try:
        yield group
    finally:
        remove_placement_group(group)


def _actors(ray: Any, group: Any, share: Mapping[str, float], count: int) -> list[Any]:
    """An actor for each bundle, with all resources of the bundle. Ray ends an actor once nothing refers to it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    agent = ray.remote(_OnNode)
    return [
        agent.options(
            num_cpus=share.get("CPU", 0.0),
            num_gpus=share.get("GPU", 0.0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            runtime_env={"env_vars": _AS_ANY_COMMAND | passed(os.environ)},
        ).remote(share.get("CPU", 0.0))
        for index in range(count)
    ]


class _OnNode:
    """The actor: the agent of a node, in a process that Ray starts.

    Args:
        cores: that are kept for its ranks.
    """

    def __init__(self, cores: float) -> None:
        self._cores = max(1, int(cores))

    def serve(self, leader: tuple[str, int], key: bytes, task: int) -> int:
        """Serve the leader to the end of its run; node 0 has task 1. Ray has set the devices that are seen."""
        channel, own = introduced(dialled(leader, time.monotonic() + JOIN_S), key)
        address = channel.link.getsockname()[0]  # by which it reaches the leader
        me = replace(who(task, task - 1, address, own_devices=True), cores=self._cores)
        return serve(channel, own, me, lambda text: None, signals=False)


def _ended(ray: Any, actors: list[Any], refs: list[Any]) -> None:
    """Give actors time to leave by themselves, then end them."""
    with suppress(Exception):  # what they raise was told when it mattered
        ray.wait(refs, num_returns=len(refs), timeout=_END_S)
    for actor in actors:
        with suppress(Exception):
            ray.kill(actor)


def _why(ray: Any, ref: Any, seconds: float) -> str:
    """What Ray says of an actor that has ended with an error; empty while it goes on."""
    done, _ = ray.wait([ref], timeout=seconds)
    if not done:
        return ""
    try:
        ray.get(done[0])
    except Exception as error:  # whatever Ray raises is a text for the user
        cause = getattr(error, "cause", None)
        if isinstance(cause, Exception):  # what the agent itself raised
            return f"{type(cause).__name__}: {cause}"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"Ray says: {type(error).__name__}: {' '.join(lines)[:_CAUSE_CHARACTERS]}"
    return ""


def _rooms(ray: Any) -> Rooms:
    return Rooms.of(ray.nodes(), ray.util.placement_group_table(), ray.cluster_resources(), ray.available_resources())

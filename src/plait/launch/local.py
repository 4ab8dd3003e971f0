"""One process per rank: on this machine, or on several that have joined."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.errors import LayoutError
from plait.launch.interface import Place
from plait.launch.local_group import LocalGroup
from plait.launch.machine import usable_cores, visible_devices
from plait.launch.node import Began, Node, Order
from plait.launch.process import WorkerProcess
from plait.launch.stall import Stillness
from plait.launch.watched_rank import Rank
from plait.launch.wire import KEY_BYTES, Channel, Start, pickled_arguments
from plait.launch.worker import SCRIPT_MODULE

START_DEADLINE_S = 180.0
"""For all workers of a group to import what they need and be constructed."""
_BEATS_PER_FREEZE = 6
_LONGEST_BEAT_S = 1.0
_LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
_GROUPS = itertools.count()


class LocalNode:
    """This machine.

    Args:
        address: on which its ranks talk to each other, and to those of other machines if there are any.
        interfaces: variables that say on which network interfaces that is.
        own_devices: whether this process sees the devices of its own ranks alone.
        python: of another environment, in which its ranks run.
    """

    node = 0

    def __init__(
        self,
        address: str = "127.0.0.1",
        interfaces: Mapping[str, str] | None = None,
        *,
        own_devices: bool = False,
        python: Path | None = None,
    ) -> None:
        self.address = address
        self._python = python
        self.own_devices = own_devices
        self.cores = usable_cores()
        self.devices = visible_devices()
        variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        self._interfaces = dict(interfaces or dict.fromkeys(variables, _LOOPBACK_INTERFACE))
        self._host = socket.gethostname()
        self.name = f"node {self.node} ({self._host})"

    def begin(self, order: Order) -> Began:
        """See `Node.begin`."""
        key = secrets.token_bytes(KEY_BYTES)
        environment = {**self._interfaces, **order.environment}
        processes: list[WorkerProcess] = []
        try:
            for rank in order.ranks:
                processes.append(WorkerProcess(key, environment, order.output_of(rank), python=self._python))
        except BaseException:
            for process in processes:
                process.kill()
            raise
        places = [
            Place(0, self._host, local, self.address, order.status)
            for local in range(order.first_local, order.first_local + len(order.ranks))
        ]
        return Began(processes, key, places)


class LocalProcesses:
    """Launches a clean interpreter per rank.

    Args:
        threads: of OpenMP and the BLAS libraries in each process.
        output_dir: gets the stdout and stderr of rank R, appended to `rankR.log`; None keeps only what errors quote.
        freeze_after_s: silence after which a rank counts as frozen; more than any action holds the interpreter lock.
        environment: further variables of the processes.
        doing: says what each rank does within its action, for the error of a rank that died or froze.
        progress: a number of each rank that changes with all that it does.
        stalled_after_s: a rank whose number stays as it is for so long, and which waits for no rank whose number
            changes, counts as stalled; 0: none does.
        on_devices: ranks may wait for each other on devices, which they cannot say: while any rank's number changes,
            only such as say for whom they wait count as stalled.
        heard: called with (rank, text) of what workers tell (`WorkerContext.tell`); returns at once.
        status: (file of this machine, bytes of a line) in which each rank has a line: `Place.status` is that file, or
            one of the rank's own machine whose lines are copied here.
        nodes: the places of the ranks, each of which gets as many, in order; by default this machine alone.
    """

    def __init__(
        self,
        *,
        threads: int = 1,
        output_dir: Path | None = None,
        freeze_after_s: float = 30.0,
        environment: Mapping[str, str] | None = None,
        doing: Callable[[], Sequence[str]] = tuple,
        progress: Callable[[], Sequence[int]] = tuple,
        stalled_after_s: float = 0.0,
        on_devices: bool = False,
        heard: Callable[[int, str], None] = lambda rank, text: None,
        status: tuple[Path, int] | None = None,
        nodes: Sequence[Node] | None = None,
    ) -> None:
        assert threads >= 1, f"threads must be at least 1, got {threads}"
        assert freeze_after_s > 0, f"freeze_after_s must be positive, got {freeze_after_s}"
        self._output_dir = output_dir
        self._freeze_after_s = freeze_after_s
        self._doing = doing
        self._progress = progress
        self._stalled_after_s, self._on_devices = stalled_after_s, on_devices
        self._heard = heard
        self._status = status
        self._nodes = tuple(nodes or (LocalNode(),))
        self._environment = {
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads)),
            "PYTHONHASHSEED": "0",  # a set has the same order on each rank
            **(environment or {}),
        }

    def start(
        self,
        worker: Callable[..., Any],
        num_ranks: int,
        *,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        deadline_s: float = START_DEADLINE_S,
    ) -> LocalGroup:
        """Construct `worker(context, *arguments, **options)` on each rank, and return when all are constructed.

        Args:
            worker: a class at the top level of a module (or of the script that runs).
            num_ranks: how many; each node gets as many.
            arguments, options: the same for each rank; small.
            deadline_s: seconds for all to be constructed.

        Raises:
            WorkerError: a constructor raised, died, or was not done in time. Nothing is left running.
            LayoutError: the ranks cannot be divided over the nodes.
            ConfigError: this Python cannot look after processes on this system.
        """
        assert num_ranks >= 1, f"a group has at least one rank, asked for {num_ranks}"
        if num_ranks % len(self._nodes):
            raise LayoutError(
                f"expected a number of ranks that can be divided by the {len(self._nodes)} places where they are to "
                f"run, found {num_ranks}"
            )
        main_file, main_module = _controllers_main()
        pickled = pickled_arguments((worker, *arguments), dict(options or {}))
        if self._output_dir is not None:
            self._output_dir.mkdir(parents=True, exist_ok=True)
        ranks, places = self._begun(num_ranks)
        beat_s = min(_LONGEST_BEAT_S, self._freeze_after_s / _BEATS_PER_FREEZE)
        starts = [
            Start(pickled, main_file, main_module, tuple(sys.argv), rank, num_ranks, beat_s, place)
            for rank, place in enumerate(places)
        ]
        limit_s, of_devices = self._stalled_after_s, self._on_devices
        stillness = Stillness(num_ranks, self._progress, limit_s, on_devices=of_devices) if limit_s > 0 else None
        group = LocalGroup(ranks, self._freeze_after_s, self._doing, stillness, self._heard)
        try:
            group.construct(starts, deadline_s)
        except BaseException:
            group.close(grace_s=0.0)
            raise
        return group

    def _begun(self, num_ranks: int) -> tuple[list[Rank], list[Place]]:
        """The processes of all nodes, and where each is."""
        ranks: list[Rank] = []
        places: list[Place] = []
        share, group, begun_on_node = num_ranks // len(self._nodes), next(_GROUPS), Counter[int]()
        status, line_bytes = self._status or (None, 0)
        several = len(self._nodes) > 1
        try:
            for node in self._nodes:
                ranks_of_node = range(len(ranks), len(ranks) + share)
                order = Order(
                    group,
                    ranks_of_node,
                    begun_on_node[node.node],
                    num_ranks,
                    self._environment,
                    self._output_dir,
                    status,
                    line_bytes,
                )
                begun_on_node[node.node] += share
                began = node.begin(order)
                for rank, process in zip(ranks_of_node, began.processes, strict=True):
                    channel = Channel(process.link, began.key, controller=True)
                    ranks.append(Rank(rank, process, channel, node.name if several else ""))
                places += [replace(place, node=node.node) for place in began.places]
        except BaseException:
            for rank in ranks:
                rank.process.kill()
            raise
        return ranks, places


def _controllers_main() -> tuple[str | None, str | None]:
    """(file, module name if it was started by that) of the script that runs, where workers find what it defines."""
    main = sys.modules["__main__"]
    sys.modules.setdefault(SCRIPT_MODULE, main)  # for what the workers send back
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    path = os.path.abspath(file) if isinstance(file, str) and os.path.isfile(file) else None
    return path, spec.name if spec is not None else None

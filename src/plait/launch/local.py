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
from plait.launch.group import Group
from plait.launch.machine import usable_cores, visible_devices
from plait.launch.node import Began, Node, Order
from plait.launch.nodes.interfaces import interface_variables
from plait.launch.process import WorkerProcess
from plait.launch.watch import Watch
from plait.launch.watched_rank import Rank
from plait.launch.wire import KEY_BYTES, Channel, Start, pickled_arguments
from plait.launch.worker import SCRIPT_MODULE
from plait.launch.worker_context import Place

START_DEADLINE_S = 180.0
"""For all workers of a group to import what they need and be constructed."""
_GROUPS = itertools.count()


class LocalNode:
    """This machine.

    Args:
        address: by which its ranks reach each other, and ranks of other machines reach them.
        interfaces: environment variables that name the network interfaces of that address.
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
        self._interfaces = dict(interfaces or interface_variables(address, {}))
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
        environment: further variables of the processes.
        output_dir: gets the stdout and stderr of rank R, appended to `rankR.log`; None keeps only what errors quote.
        status: (file of this machine, bytes of a line) in which each rank has a line: `Place.status` is that file, or
            one of the rank's own machine whose lines are copied here.
        nodes: the places of the ranks, each of which gets as many, in order; by default this machine alone.
        watch: how they are looked after.
    """

    def __init__(
        self,
        *,
        threads: int = 1,
        environment: Mapping[str, str] | None = None,
        output_dir: Path | None = None,
        status: tuple[Path, int] | None = None,
        nodes: Sequence[Node] | None = None,
        watch: Watch | None = None,
    ) -> None:
        assert threads >= 1, f"threads must be at least 1, got {threads}"
        self._output_dir = output_dir
        self._status = status
        self._nodes = tuple(nodes or (LocalNode(),))
        self._watch = watch or Watch()
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
    ) -> Group:
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
        starts = [
            Start(pickled, main_file, main_module, tuple(sys.argv), rank, num_ranks, self._watch.beat_s, place)
            for rank, place in enumerate(places)
        ]
        group = Group(ranks, self._watch)
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

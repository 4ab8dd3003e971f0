"""Where ranks of a group run: this machine, or one that has joined. What each such place does alike."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plait.launch.worker_context import Place


class Process(Protocol):
    """One worker's process, as `process.WorkerProcess` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def link(self) -> socket.socket:
        """The leader's end of its connection."""
        ...

    @property
    def exited(self) -> bool: ...

    @property
    def doubtful(self) -> bool:
        """Whether its machine may be lost, which is not known yet."""
        ...

    def wait(self, deadline: float) -> bool: ...

    def state(self) -> str: ...

    def dump_stack(self, *, stopped: bool = False) -> str: ...

    def cause_of_death(self) -> tuple[str, str]: ...

    def output(self) -> tuple[str, str]:
        """The last lines that it has printed, and the file of all that it prints; each empty where there is none."""
        ...

    def send_signal(self, number: int) -> None: ...

    def signal_group(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True)
class Order:
    """What a node is to start.

    group:       number of the group, among those that this process starts
    ranks:       of this node
    first_local: number of its first rank among all of the machine
    status:      file in which every rank of the group has a line of `line_bytes`; None: there is none
    """

    group: int
    ranks: Sequence[int]
    first_local: int
    num_ranks: int
    environment: Mapping[str, str]
    output_dir: Path | None
    status: Path | None
    line_bytes: int

    def output_of(self, rank: int) -> Path | None:
        return None if self.output_dir is None else self.output_dir / f"rank{rank}.log"


@dataclass(frozen=True)
class Began:
    """Processes in the order of their ranks, the key of their connections, and where each is."""

    processes: Sequence[Process]
    key: bytes
    places: Sequence[Place]


class Node(Protocol):
    @property
    def name(self) -> str:
        """For messages: `node 1 (host)`."""
        ...

    @property
    def node(self) -> int:
        """Number of the machine: several commands may be on one."""
        ...

    @property
    def cores(self) -> int:
        """That its ranks may use."""
        ...

    @property
    def devices(self) -> int:
        """CUDA devices that it sees."""
        ...

    @property
    def own_devices(self) -> bool:
        """Whether it sees those of its own ranks alone, where several places are on one machine."""
        ...

    def begin(self, order: Order) -> Began:
        """Start processes. Raises RunError or OSError if that fails; none is left then."""
        ...

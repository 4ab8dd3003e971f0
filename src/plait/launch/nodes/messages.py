"""What the leader and the agent of a node say to each other. Pickled in frames of `wire.Channel`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LEADS_ALONE = -1
"""In the place of its node's number: a leader with no ranks of its own."""

# -- of either


@dataclass(frozen=True)
class Alive:
    """Said every second. An agent says how much of its node's memory is used."""

    used_bytes: int = 0


@dataclass(frozen=True)
class Data:
    """Bytes of the connection between the leader and a rank's worker, which neither end of this one can read."""

    rank: int
    data: bytes


@dataclass(frozen=True)
class Closed:
    """That connection has ended."""

    rank: int


# -- of the agent


@dataclass(frozen=True)
class Joined:
    """The first message: who this is.

    task:         number of the command among all that make up the run, from 1 on (the leader's is 0)
    node:         number of the machine, or LEADS_ALONE
    address:      on which its ranks talk to those of other nodes
    devices:      CUDA devices that it sees
    own_devices:  whether it sees none but those of its own ranks
    memory_bytes: of the machine, or of the control group that it is in
    versions:     (what, version) that must be equal on all nodes
    hardware:     (`device` of a recipe, its kind there in words)
    keys:         (key of the recipe, its value) that it was begun with; none where it was given no recipe
    files:        (key and what it names, digest of that) of what its ranks read for themselves; none as of keys
    """

    task: int
    node: int
    host: str
    pid: int
    address: str
    devices: int
    own_devices: bool
    cores: int
    memory_bytes: int
    versions: tuple[tuple[str, str], ...]
    hardware: tuple[tuple[str, str], ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return f"{'the leader' if self.node == LEADS_ALONE else f'node {self.node}'} ({self.host})"

    def unlike(self, other: Joined) -> list[str]:
        """Keys of the recipe that have another value than in another command, that of the other first; none where one
        has no recipe."""
        theirs = dict(other.keys)
        return [
            f"`{key}` {theirs[key]:.40}, not {value:.40}" for key, value in self.keys if theirs.get(key, value) != value
        ]

    def other_files(self, other: Joined) -> list[str]:
        """Names of files that both nodes read, each from its own disk, with different contents."""
        theirs = dict(other.files)
        return [name for name, digest in self.files if theirs.get(name, digest) != digest]


@dataclass(frozen=True)
class Exited:
    """A rank's process, of the group of that number, has ended."""

    group: int
    rank: int


@dataclass(frozen=True)
class Lines:
    """What the ranks of the node say that they do, from a place in the group's status file on."""

    group: int
    start: int
    data: bytes


@dataclass(frozen=True)
class Answered:
    """What came of the `Instruction` of that number."""

    number: int
    answer: Answer


@dataclass(frozen=True)
class Wish:
    """The agent was asked by a signal to stop the run."""


@dataclass(frozen=True)
class Leaving:
    """The agent ends, and its ranks with it."""

    why: str


# -- of the leader


@dataclass(frozen=True)
class Welcome:
    """The agent belongs to the run. Silence of the leader's after which it counts as lost."""

    silent_after_s: float


@dataclass(frozen=True)
class Launch:
    """Start a worker process for each of these ranks; answered by `Launched`, or why that failed.

    group:       number of the group, of which the workers' key is made
    output_dir:  gets `rankR.log` of each
    folder:      that they work in, where the node has it
    line_bytes:  of one rank in the status file
    """

    group: int
    ranks: tuple[int, ...]
    num_ranks: int
    environment: tuple[tuple[str, str], ...]
    output_dir: str | None
    folder: str
    line_bytes: int


class About(Enum):
    """What is asked of a rank's process; see `process.WorkerProcess`."""

    STATE = "state"
    STACK = "stack"
    STACK_OF_STOPPED = "stack of stopped"
    DEATH = "death"
    OUTPUT = "output"


@dataclass(frozen=True)
class Question:
    """A question about a worker's process. The answer is what `process.WorkerProcess` says, or empty if that fails."""

    rank: int
    about: About


@dataclass(frozen=True)
class Touch:
    """Write a file with this text. The answer is empty if that succeeds, else the reason why not."""

    path: str
    text: str


@dataclass(frozen=True)
class Echo:
    """Answered by `Clock`: how long so many bytes take, and how far the node's clock is ahead."""

    payload: bytes


@dataclass(frozen=True)
class Signal:
    rank: int
    number: int


@dataclass(frozen=True)
class Kill:
    """End all ranks; answered by nothing when they are gone."""


@dataclass(frozen=True)
class Instruction:
    """A command to the agent, which does one after another and answers each with an `Answered` of the same number."""

    number: int
    what: Launch | Question | Touch | Echo | Kill


@dataclass(frozen=True)
class Launched:
    """pids: process ids of the ranks, in the order of `Launch`; status: the node's file of their status lines"""

    pids: tuple[int, ...]
    status: str


@dataclass(frozen=True)
class Clock:
    """What the node's clock says, `time.perf_counter`."""

    now_s: float


Answer = Launched | Clock | tuple[str, ...]
"""To a `Launch` that went well, to an `Echo`, or to all else."""


@dataclass(frozen=True)
class Note:
    """To be said to whoever watches the node."""

    text: str


@dataclass(frozen=True)
class End:
    """The run is over: leave with this exit code.

    text: what node 0 said of it; empty if it ended well
    """

    code: int
    text: str

"""Which part of a run on several machines a command is: by its options, or by the variables of torchrun or Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import ConfigError

_LAST_PORT = 65_535
_LEAST_PORT, _PORTS = 20_000, 20_000
"""Under Slurm the leader's port is made of the job's number."""
_NEEDS = (
    "give `--nodes N --node I --leader HOST:PORT` on each node, or start the command on every node by srun or torchrun"
)


@dataclass(frozen=True)
class NodeOptions:
    """What the command line says; None: nothing."""

    nodes: int | None = None
    node: int | None = None
    leader: str | None = None
    address: str | None = None

    @property
    def given(self) -> list[str]:
        options = (("--nodes", self.nodes), ("--node", self.node), ("--leader", self.leader))
        return [name for name, value in (*options, ("--address", self.address)) if value is not None]


@dataclass(frozen=True)
class Attached:
    """One of the commands of a run on several machines.

    task:    number of this command; 0 leads
    tasks:   how many there are
    node:    number of this machine
    leader:  host and port where the leader listens until all have come
    address: of this machine, for its ranks; None: the one by which it reaches the leader
    by:      what told it, in words
    own_devices: whether a command sees the devices of its own ranks alone
    """

    task: int
    tasks: int
    node: int
    leader: tuple[str, int]
    address: str | None
    by: str
    own_devices: bool = False

    nodes: int = 0
    """How many machines the commands are on, as far as that is known before they have come; 0: as many as commands."""

    @property
    def leads(self) -> bool:
        return self.task == 0

    @property
    def num_nodes(self) -> int:
        return self.nodes or self.tasks


def attached(launcher: str, options: NodeOptions, environ: Mapping[str, str]) -> Attached | None:
    """The part of this command in a run on several nodes; None if it is a run by itself on this machine.

    Args:
        launcher: of the recipe: `auto` and `attach` look, the latter must find something. With `ray` only `--nodes`
            may be said, which this does not use.

    Raises:
        ConfigError: what is said contradicts itself, is not enough, or is for another launcher.
    """
    if launcher not in ("auto", "attach"):
        if launcher == "ray" and options.nodes == 0:
            raise ConfigError("expected --nodes of 1 or more with `launcher` ray, found 0")
        if unfit := [name for name in options.given if launcher == "local" or name != "--nodes"]:
            raise ConfigError(
                f"{unfit[0]} is for a run that is started on each node, but `launcher` is {launcher}; leave one out"
            )
        return None
    place = None
    if options.nodes is not None or options.node is not None:
        place = _by_options(options)
    elif "RANK" in environ and "WORLD_SIZE" in environ:
        place = _by_torchrun(options, environ)
    elif "SLURM_PROCID" in environ and ("SLURM_STEP_NUM_TASKS" in environ or launcher == "attach"):
        place = _by_slurm(options, environ)
    elif options.given:
        raise ConfigError(f"{options.given[0]} has no effect without the number of nodes; {_NEEDS}")
    if launcher == "attach" and place is None:
        raise ConfigError(f"`launcher` is attach, but nothing says which node this is; {_NEEDS}")
    if place is None or place.tasks <= 1:
        return None
    if place.task >= place.tasks:
        raise ConfigError(f"{place.by}: expected a command from 0 to {place.tasks - 1}, found {place.task}; {_NEEDS}")
    return place


def _by_options(options: NodeOptions) -> Attached:
    nodes, node = options.nodes, options.node
    if nodes is None or (nodes > 1 and (node is None or options.leader is None)):
        lacking = [
            name
            for name, value in (("--nodes", nodes), ("--node", node), ("--leader", options.leader))
            if value is None
        ]
        verb = "is" if len(lacking) == 1 else "are"
        raise ConfigError(f"{' and '.join(lacking)} {verb} missing beside {', '.join(options.given)}; {_NEEDS}")
    if nodes < 1 or not 0 <= (node or 0) < nodes:
        raise ConfigError(f"expected --node from 0 to {max(0, nodes - 1)} with --nodes {nodes}, found {node}")
    leader = ("", 0) if options.leader is None else leader_of(options.leader)
    return Attached(node or 0, nodes, node or 0, leader, options.address, "--node")


def _by_torchrun(options: NodeOptions, environ: Mapping[str, str]) -> Attached:
    task, tasks = (_number(environ, name) for name in ("RANK", "WORLD_SIZE"))
    local = _number(environ, "LOCAL_WORLD_SIZE", 1)
    node = _number(environ, "GROUP_RANK", task // max(1, local))
    if options.leader is not None:
        leader = leader_of(options.leader)
    elif tasks > 1:
        # torchrun itself listens on MASTER_PORT, where it keeps its own store.
        taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = _number(environ, "MASTER_PORT") + taken
        if not 1 <= port <= _LAST_PORT:
            behind = ", behind that of torchrun itself" if taken else ""
            raise ConfigError(
                f"the variable MASTER_PORT: expected a port of up to {_LAST_PORT}{behind}, found {port - taken}; give "
                "--leader HOST:PORT"
            )
        leader = (_text(environ, "MASTER_ADDR"), port)
    else:
        leader = ("", 0)
    nodes = max(1, tasks // max(1, local))
    return Attached(task, tasks, node, leader, options.address, "torchrun's variables", nodes=nodes)


def _by_slurm(options: NodeOptions, environ: Mapping[str, str]) -> Attached:
    task = _number(environ, "SLURM_PROCID")
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))
    if options.leader is not None:
        leader = leader_of(options.leader)
    elif tasks > 1:
        names = environ.get("SLURM_STEP_NODELIST") or _text(environ, "SLURM_NODELIST")
        leader = (first_host(names), _LEAST_PORT + _number(environ, "SLURM_JOB_ID") % _PORTS)
    else:
        leader = ("", 0)
    own_devices = "SLURM_GPUS_PER_TASK" in environ
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", _number(environ, "SLURM_JOB_NUM_NODES", 0))
    return Attached(
        task, tasks, _number(environ, "SLURM_NODEID"), leader, options.address, "Slurm's variables", own_devices, nodes
    )


def leader_of(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Raises:
        ConfigError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch(r"\d{1,5}", port) or not 1 <= int(port) <= _LAST_PORT:
        raise ConfigError(f"--leader: expected HOST:PORT with a port from 1 to {_LAST_PORT}, found `{text:.80}`")
    return host, int(port)


def first_host(names: str) -> str:
    """The first of Slurm's list of hosts: `gpu[003-007,12],login` → `gpu003`, `rack[2-3]n[1-8]` → `rack2n1`.

    Raises:
        ConfigError: the list does not begin with a name.
    """
    match = re.match(r"[^,\[\]]+(?:\[\d[^\]]*\][^,\[\]]*)*(?=,|$)", names)
    if match is None:
        raise ConfigError(f"SLURM_NODELIST: expected the names of hosts, found `{names:.80}`; give --leader HOST:PORT")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in environ and default is not None:
        return default
    text = _text(environ, name)
    if not re.fullmatch(r"\d{1,9}", text):
        raise ConfigError(f"the variable {name}: expected a number, found {text!r}; {_NEEDS}")
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(f"the variable {name} is not set; {_NEEDS}")
    return environ[name]

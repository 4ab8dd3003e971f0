"""NCCL's rules without a GPU: what ranks post to gloo is recorded, and played again as NCCL would run it.

Gloo finds messages by tag and runs all of them at once, so it cannot show what hangs on NCCL. Here every rank keeps a
log of what it posted and waited for; `played` gives each rank one line of work for each communicator:

    a collective            starts when every rank of the group has come to it, and must be the same on all
    a batch of messages     one work in the line of its group: its messages run at once, and are over together
    a message alone         in a line that is this pair's alone, both directions one behind the other
    the first use           of a line, or of a line in one direction, makes connections: the process itself, not its
                            GPU, stands still in the call until every rank that it connects has called too. Which
                            connections a collective takes depends on its size: each may be the first of its kind
    a tensor                is contiguous, and of a dtype that NCCL has
    two messages            meet by their order; that their tags and sizes are equal, too, is what we ask

Groups that are made for gloo are left alone: tensors of the CPU go there.

    with recording() as log:            # in each process, before the groups are made
        ...
    played({rank: log of rank})         # raises Broken
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from plait.models.parallel import nccl

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor",
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor",
    "barrier",
)
DTYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
}
"""Of tensors that it takes."""
Group = tuple[int, tuple[int, ...]]
"""How many were made before, and its ranks."""


@dataclass(frozen=True)
class Op:
    """A message, or a rank's part of a collective."""

    kind: str
    peer: int | None
    """The other rank of a message; None: a collective."""
    size: tuple[int, str]
    """Elements and dtype."""
    tag: int = 0


@dataclass(frozen=True)
class Post:
    number: int
    group: Group
    pair: tuple[int, int] | None
    """Sender and receiver of a message that was posted alone."""
    ops: tuple[Op, ...]

    @property
    def line(self) -> tuple[Group, tuple[int, int] | None]:
        return self.group, self.pair

    @property
    def is_collective(self) -> bool:
        return self.ops[0].peer is None


Event = Post | int
"""What was posted, or the number of a post that is waited for."""
Log = list[Event]


class Broken(AssertionError):
    """What ranks do breaks a rule of NCCL."""


# -- as it would run


@dataclass
class _Unit:
    rank: int
    post: Post
    open: list[Op] = field(default_factory=list)

    def __str__(self) -> str:
        what = ", ".join(f"{op.kind}{'' if op.peer is None else f' rank {op.peer}'} {op.size}" for op in self.open)
        return f"rank {self.rank}: {what} on {self.post.line}"


Way = tuple[Any, ...]
"""What a call may have to connect first: a line, one direction of it, or the ranks of a collective once more."""


class _Player:
    def __init__(self, logs: Mapping[int, Log]) -> None:
        self._logs, self._at = logs, dict.fromkeys(logs, 0)
        self._lines: dict[Any, dict[int, deque[_Unit]]] = {}
        self._calling: dict[int, tuple[_Unit, set[Way]]] = {}
        """Rank that stands still in a call → what it posts, and what is to be connected before."""
        self._came: dict[Way, set[int]] = {}
        """Ranks that have come to a way's end; it is open when all that it connects have."""
        self._collectives: dict[tuple[int, Any], int] = {}
        """(rank, line) → collectives that the rank has come to there."""
        self._over: set[tuple[int, int]] = set()

    def play(self) -> None:
        while self._posts() or self._runs():
            pass
        if any(self._at[rank] < len(log) for rank, log in self._logs.items()):
            raise Broken("these wait for each other:\n" + "\n".join(map(str, self._heads())))
        left = list(self._heads())
        if left:
            raise Broken("nobody waits for these, and they never end:\n" + "\n".join(map(str, left)))

    def _heads(self) -> Iterator[_Unit]:
        yield from (unit for unit, _ in self._calling.values())
        for line in self._lines.values():
            yield from (units[0] for units in line.values() if units)

    def _posts(self) -> bool:
        """Every rank goes on to its next wait."""
        came = False
        for rank, log in self._logs.items():
            while self._at[rank] < len(log):
                event = log[self._at[rank]]
                if isinstance(event, Post):
                    if rank not in self._calling:
                        came = True
                        self._calling[rank] = _Unit(rank, event, list(event.ops)), self._comes(rank, event)
                    unit, ways = self._calling[rank]
                    if not all(self._came[way].issuperset(_ends(way)) for way in ways):
                        break
                    del self._calling[rank]
                    self._lines.setdefault(event.line, {}).setdefault(rank, deque()).append(unit)
                elif (rank, event) not in self._over:
                    break
                self._at[rank] += 1
                came = True
        return came

    def _comes(self, rank: int, post: Post) -> set[Way]:
        """A rank comes to a call: the ways that it takes."""
        line = post.line
        ways: set[Way] = {(line,)}
        if post.is_collective:
            number = self._collectives[rank, line] = self._collectives.get((rank, line), 0) + 1
            ways.add((line, number))
        for op in post.ops:
            if op.peer is not None:
                ways.add((line, *((rank, op.peer) if op.kind == "send" else (op.peer, rank))))
        for way in ways:
            self._came.setdefault(way, set()).add(rank)
        return ways

    def _runs(self) -> bool:
        ran = [self._runs_line(name, line) for name, line in self._lines.items()]
        return any(ran)

    def _runs_line(self, name: Any, line: dict[int, deque[_Unit]]) -> bool:
        members = _members(name)
        heads = {rank: units[0] for rank, units in line.items() if units}
        if heads and all(unit.post.is_collective for unit in heads.values()):
            if len(heads) < len(members):
                return False
            if len({unit.post.ops for unit in heads.values()}) > 1:
                raise Broken("ranks come to other collectives:\n" + "\n".join(map(str, heads.values())))
            for rank in members:
                self._end(line, rank)
            return True
        met = [self._meets(unit, heads) for unit in heads.values() if not unit.post.is_collective]
        for rank, unit in heads.items():
            if not unit.open:
                self._end(line, rank)
        return any(met)

    def _meets(self, sender: _Unit, heads: Mapping[int, _Unit]) -> bool:
        """Messages of a unit that come through."""
        came = False
        for sent in [op for op in sender.open if op.kind == "send"]:
            receiver = heads.get(sent.peer)  # type: ignore[arg-type]
            if receiver is None:
                continue
            found = next((op for op in receiver.open if (op.kind, op.peer) == ("recv", sender.rank)), None)
            if found is None:
                continue
            if (found.size, found.tag) != (sent.size, sent.tag):
                raise Broken(f"a message meets another than it is meant for:\n{sender}\n{receiver}")
            sender.open.remove(sent)
            receiver.open.remove(found)
            came = True
        return came

    def _end(self, line: dict[int, deque[_Unit]], rank: int) -> None:
        unit = line[rank].popleft()
        self._over.add((rank, unit.post.number))


def _members(line: tuple[Group, tuple[int, int] | None]) -> tuple[int, ...]:
    (_, ranks), pair = line
    return ranks if pair is None else pair


def _ends(way: Way) -> tuple[int, ...]:
    """The ranks that a way connects."""
    line, *ends = way
    return tuple(ends) if len(ends) == 2 else _members(line)


def played(logs: Mapping[int, Log]) -> int:
    """Play the logs of all ranks as NCCL would run them; how many works they posted.

    Raises:
        Broken: ranks wait for each other, or a message or collective meets another one.
    """
    _Player(logs).play()
    return sum(isinstance(event, Post) for log in logs.values() for event in log)


# -- what ranks do


class _Work:
    """A work of torch.distributed whose waits are recorded."""

    def __init__(self, work: Any, number: int, log: Log) -> None:
        self._work, self._number, self._log = work, number, log

    def wait(self, *timeout: Any) -> Any:
        self._log.append(self._number)
        return self._work.wait(*timeout)


class _Recorder:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._groups: dict[Any, Group | None] = {}
        self._made = 0
        self._real = {name: getattr(dist, name) for name in (*COLLECTIVES, *_MESSAGES, "new_group", "P2POp")}

    def serves(self, group: Any) -> bool:
        """In place of `nccl.serves`."""
        return dist.is_initialized() and self._named(group) is not None

    def patches(self) -> dict[str, Any]:
        """Name of torch.distributed → what stands there."""
        found: dict[str, Any] = {name: self._collective(name) for name in COLLECTIVES}
        found |= {name: self._alone(name) for name in ("isend", "irecv", "send", "recv")}
        originals = {found[name]: self._real[name] for name in ("isend", "irecv")}
        found["P2POp"] = lambda op, *args, **options: self._real["P2POp"](originals.get(op, op), *args, **options)
        return found | {"batch_isend_irecv": self._batch, "new_group": self._new_group}

    def _named(self, group: Any) -> Group | None:
        if group is None or group is dist.group.WORLD:
            return 0, tuple(range(dist.get_world_size()))
        return self._groups[group]

    def _new_group(self, ranks: Sequence[int] | None = None, *args: Any, backend: str | None = None, **options: Any):
        group = self._real["new_group"](ranks, *args, backend=backend, **options)
        self._made += 1
        members = tuple(sorted(ranks)) if ranks is not None else tuple(range(dist.get_world_size()))
        self._groups[group] = None if backend == "gloo" else (self._made, members)
        return group

    def _post(self, group: Group, pair: tuple[int, int] | None, ops: Sequence[Op]) -> int:
        number = len(self._log)
        self._log.append(Post(number, group, pair, tuple(ops)))
        return number

    def _collective(self, name: str) -> Any:
        real = self._real[name]

        def call(*args: Any, group: Any = None, **options: Any) -> Any:
            named = self._named(group)
            if named is None:
                return real(*args, group=group, **options)
            size = _size(args[-1] if name.startswith("all_gather") else args[0]) if args else (0, "")
            root = options.get("group_src", options.get("group_dst", ""))
            number = self._post(named, None, [Op(f"{name} {root}".strip(), None, size)])
            work = real(*args, group=group, **options)
            if options.get("async_op"):
                return _Work(work, number, self._log)
            self._log.append(number)
            return work

        return call

    def _alone(self, name: str) -> Any:
        real = self._real[name]

        def call(tensor: Any, peer: int | None = None, group: Any = None, **options: Any) -> Any:
            places = {key: options[key] for key in ("group_src", "group_dst") if key in options}
            named = self._named(group)
            given = () if peer is None else (peer,)
            if named is None:
                return real(tensor, *given, group=group, **options)
            other = peer if peer is not None else named[1][next(iter(places.values()))]
            own = dist.get_rank()
            op = Op(name.removeprefix("i"), other, _size(tensor), options.get("tag", 0))
            number = self._post(named, (min(own, other), max(own, other)), [op])
            work = real(tensor, *given, group=group, **options)
            if name.startswith("i"):
                return _Work(work, number, self._log)
            self._log.append(number)
            return work

        return call

    def _batch(self, operations: Sequence[Any]) -> list[Any]:
        named = self._named(operations[0].group)
        works = self._real["batch_isend_irecv"](operations)
        if named is None:
            return works
        kinds = {self._real["isend"]: "send", self._real["irecv"]: "recv"}
        ops = [Op(kinds[one.op], one.peer, _size(one.tensor), one.tag) for one in operations]
        number = self._post(named, None, ops)
        return [_Work(work, number, self._log) for work in works]


_MESSAGES = ("isend", "irecv", "send", "recv", "batch_isend_irecv")


def _size(tensor: torch.Tensor) -> tuple[int, str]:
    if tensor.dtype not in DTYPES or not tensor.is_contiguous():
        raise Broken(f"NCCL takes no {tensor.dtype} of {tuple(tensor.shape)} with strides {tensor.stride()}")
    return tensor.numel(), str(tensor.dtype)


@contextmanager
def recording() -> Iterator[Log]:
    """In a process whose groups are not made yet: what it posts to all but gloo's groups, as if NCCL carried it."""
    log: Log = []
    recorder = _Recorder(log)
    with (
        patch.multiple(dist, **recorder.patches()),
        patch.multiple(
            nccl,
            serves=recorder.serves,
            carries=lambda group, device: recorder.serves(group),
            device=lambda: torch.device("cpu"),
        ),
    ):
        yield log

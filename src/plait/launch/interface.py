"""What a group of workers offers, and what a worker is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # what torch.distributed.Store is


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    node:    number of its machine, of those of the group; host: its name
    device:  number of its device among those that its process sees
    address: on which it talks to ranks of other machines
    status:  a file of its machine with a line for each rank of the group, which the leader sees too; None: none
    ahead_s: how far the clock of its machine, `time.perf_counter`, was ahead of that of the process that launched it,
             when it did
    """

    node: int = 0
    host: str = ""
    device: int = 0
    address: str = "127.0.0.1"
    status: Path | None = None
    ahead_s: float = 0.0


class WorkerContext:
    """What a worker knows about its group; the first argument of its constructor.

    Args:
        open_store: opens the group's key-value store.
        tell: has the process that launched the group hear a text.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        open_store: Callable[[], Store],
        place: Place | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.place = place or Place()
        self.tell = tell
        """Say something to the process that launched the group: its `heard` is called with the rank and the text, in
        the order in which the rank says it and before what the rank's action returns."""
        self._open_store = open_store
        self._store: Store | None = None
        self._waits: tuple[str, ...] = ()

    def store(self, name: str = "world") -> Store:
        """The group's key-value store, for `torch.distributed.init_process_group(backend, store=..., rank=...,
        world_size=...)`. A process group that is made anew needs another name. Imports torch."""
        import torch.distributed as dist

        if self._store is None:
            self._store = self._open_store()
        return dist.PrefixStore(name, self._store)  # pyright: ignore[reportPrivateImportUsage]

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Say what this rank waits for, for the error of a wait that does not end:
        `with context.waiting_for("rank 1 (recv 3F0)"): work.wait()`."""
        before, self._waits = self._waits, (*self._waits, what)
        try:
            yield
        finally:
            self._waits = before

    @property
    def waits_for(self) -> str:
        """The innermost thing waited for; empty if nothing."""
        waits = self._waits
        return waits[-1] if waits else ""


class Handle(Protocol):
    """The answers of one submitted action."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def method(self) -> str: ...

    @property
    def done(self) -> bool:
        """Whether all ranks have answered, or one has raised."""
        ...

    def result(self, deadline_s: float) -> Any:
        """What the method returned: the value itself if one rank was named by its number, else a list in the order of
        the ranks. May be called again.

        Args:
            deadline_s: seconds to wait at most. What runs in this process has run when `submit` returns.

        Raises:
            WorkerError: the action raised on one of its ranks; a rank of the group died or froze, or another rank
                raised and nobody has been told yet; the deadline has passed; the group was closed before.
        """
        ...


class Group(Protocol):
    """Running workers, one per rank."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each rank."""
        ...

    @property
    def bytes_sent(self) -> int:
        """To the workers, messages and all."""
        ...

    @property
    def bytes_received(self) -> int: ...

    def submit(self, ranks: int | Sequence[int], method: str, *args: Any, **kwargs: Any) -> Handle:
        """Have a method called on one or several ranks, after all that was submitted to them before.

        Arguments and results are pickled between processes: small ones only.

        Raises:
            WorkerError: a rank of the group has died or frozen. ValueError: the arguments are too large.
        """
        ...

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of a rank; nothing happens where that has ended."""
        ...

    def wait(self, handles: Sequence[Handle], deadline_s: float) -> list[Handle]:
        """Those that are done, at least one, as soon as there is one.

        Raises:
            WorkerError: as `Handle.result`.
        """
        ...

    def close(self, grace_s: float = 2.0) -> None:
        """End the workers: each ends the action that it is in and calls its own `close()`, if it has one; those that
        take longer than `grace_s` are killed. Returns when all are gone. Harmless when done before."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None:
        """`close()`; if an exception leaves the block, workers in other processes are killed at once."""

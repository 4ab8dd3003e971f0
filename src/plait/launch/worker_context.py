"""What a worker is given: its place, and what it knows about its group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
        place: Place,
        tell: Callable[[str], None],
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.place = place
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

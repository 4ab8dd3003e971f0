"""A group of worker processes, here or on other machines, and the handles of what it was asked."""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections.abc import Sequence
from typing import Any, Self

from plait.launch.failures import Ended, Failure, WorkerError
from plait.launch.monitor import Monitor
from plait.launch.watch import Watch
from plait.launch.watched_rank import Pending, Rank
from plait.launch.wire import Call, Raised, Reply, Start, Stop, pickled_arguments


class Group:
    """Running workers, one per rank. Made by `LocalProcesses.start`."""

    def __init__(self, ranks: list[Rank], watch: Watch) -> None:
        self._ranks = ranks
        self.pids = tuple(rank.process.pid for rank in ranks)
        """Process id of each rank."""
        self._handles: dict[int, Handle] = {}
        self._numbers = itertools.count()
        self._untold: list[tuple[Handle, int]] = []
        """(handle, place) of exceptions that nobody has been told."""
        self._monitor = Monitor(self._ranks, self._deliver, watch)

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    @property
    def bytes_sent(self) -> int:
        """To the workers, messages and all."""
        return sum(rank.channel.bytes_sent for rank in self._ranks)

    @property
    def bytes_received(self) -> int:
        return sum(rank.channel.bytes_received for rank in self._ranks)

    def construct(self, starts: list[Start], deadline_s: float) -> None:
        """Construct the workers; once, before all else.

        Raises:
            WorkerError: as `Handle.result`.
        """
        with self._monitor.changed:
            handle = Handle(self, tuple(range(self.num_ranks)), "start", several=True)
            self._enqueue(handle, next(self._numbers), starts)
        handle.result(deadline_s)

    def submit(self, ranks: int | Sequence[int], method: str, *args: Any, **kwargs: Any) -> Handle:
        """Have a method called on one or several ranks, after all that was submitted to them before.

        Arguments and results are pickled between processes: small ones only.

        Raises:
            WorkerError: a rank of the group has died or frozen.
            ValueError: the arguments are too large.
        """
        assert not method.startswith("_"), f"`{method}` is private to the worker"
        several = not isinstance(ranks, int)
        chosen = tuple(ranks) if not isinstance(ranks, int) else (ranks,)
        assert chosen, "no rank is named"
        assert len(set(chosen)) == len(chosen), f"ranks must be distinct, got {ranks}"
        assert all(0 <= rank < self.num_ranks for rank in chosen), f"ranks {ranks} of a group of {self.num_ranks}"
        pickled = pickled_arguments(args, kwargs)
        with self._monitor.changed:
            assert not self._monitor.closing, "the group is closed"
            if self._monitor.failure is not None:
                raise WorkerError(self._monitor.failure)
            handle, number = Handle(self, chosen, method, several=several), next(self._numbers)
            self._enqueue(handle, number, [Call(number, method, pickled)] * len(chosen))
        return handle

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the process of a rank; nothing happens where that has ended."""
        with self._monitor.changed:
            if not self._ranks[rank].dead:
                self._ranks[rank].process.send_signal(number)

    def _enqueue(self, handle: Handle, number: int, messages: Sequence[Start | Call]) -> None:
        self._handles[number] = handle
        for place, message in zip(handle.ranks, messages, strict=True):
            rank = self._ranks[place]
            rank.pending.append(Pending(number, handle.method, time.monotonic()))
            if not rank.channel.put(message):
                self._monitor.wake()

    def _deliver(self, rank: int, pending: Pending, reply: Reply) -> None:
        handle = self._handles[pending.number]
        place = handle.ranks.index(rank)
        handle.replies[place] = reply
        if isinstance(reply.value, Raised):
            self._untold.append((handle, place))
        if None not in handle.replies:
            del self._handles[pending.number]

    # -- waiting

    def wait(self, handles: Sequence[Handle], deadline_s: float) -> list[Handle]:
        """Wait until at least one of the handles is done, and return all that are.

        Raises:
            WorkerError: as `Handle.result`.
        """
        assert handles, "nothing to wait for"
        end = _end(deadline_s)
        with self._monitor.changed:
            while not (finished := [handle for handle in handles if handle.done]):
                self._wait_on(handles[0], end, deadline_s)
            return finished

    def wait_for(self, handle: Handle, deadline_s: float) -> None:
        """Until each rank has answered.

        Raises:
            WorkerError: as `Handle.result`.
        """
        end = _end(deadline_s)
        with self._monitor.changed:
            while True:
                for place, reply in enumerate(handle.replies):
                    if reply is not None and isinstance(reply.value, Raised):
                        raise self._raised(handle, place)
                if None not in handle.replies:
                    return
                self._wait_on(handle, end, deadline_s)

    def _wait_on(self, handle: Handle, end: float, deadline_s: float) -> None:
        """Wait for a change that may concern an unfinished handle, or raise what keeps it from being done."""
        if self._monitor.failure is not None:
            raise WorkerError(self._monitor.failure)
        if self._monitor.closing:
            rank = handle.missing()
            raise WorkerError(Failure(Ended.CLOSED, rank, handle.method, 0.0, "was closed before it was done"))
        if self._untold:
            raise self._raised(*self._untold[0])
        if (left_s := end - time.monotonic()) <= 0:
            raise self._late(handle, deadline_s)
        self._monitor.changed.wait(left_s)

    def _raised(self, handle: Handle, place: int) -> WorkerError:
        self._untold = [entry for entry in self._untold if entry != (handle, place)]
        reply = handle.replies[place]
        assert reply is not None and isinstance(reply.value, Raised), "no exception is there"  # noqa: PT018
        failure = handle.failures[place]
        if failure is None:
            rank = self._ranks[handle.ranks[place]]
            peers = () if self._monitor.closing else self._monitor.look_at_peers(rank.rank)
            output, file = rank.process.output()
            handle.failures[place] = failure = Failure(
                Ended.RAISED,
                handle.ranks[place],
                handle.method,
                reply.seconds,
                f"raised {reply.value.name}",
                reply.value.traceback,
                peers=peers,
                output=output,
                output_file=file,
                node=rank.node,
            )
        error = WorkerError(failure)
        if reply.value.exception is not None:
            error.__cause__ = pickle.loads(reply.value.exception)
        return error

    def _late(self, handle: Handle, deadline_s: float) -> WorkerError:
        rank = self._ranks[handle.missing()]
        rank.ask()
        peers = self._monitor.look_at_peers(rank.rank)
        if self._monitor.failure is not None:  # found meanwhile
            return WorkerError(self._monitor.failure)
        state = rank.state(dump=True)
        cause = f"has not answered within the deadline of {deadline_s:g} s"
        if state.action != handle.method:
            cause += f"; `{handle.method}` waits behind it"
        output, file = rank.process.output()
        return WorkerError(
            Failure(
                Ended.LATE,
                rank.rank,
                state.action,
                state.seconds,
                cause,
                state.stack,
                state.waits_for,
                peers,
                output,
                file,
                rank.node,
            )
        )

    # -- end

    def close(self, grace_s: float = 2.0) -> None:
        """End the workers: each ends the action that it is in and calls its own `close()`, if it has one; those that
        take longer than `grace_s` are killed. Returns when all are gone. Harmless when done before."""
        monitor = self._monitor
        with monitor.changed:
            if monitor.closing:
                return
            monitor.closing = True
            for rank in self._ranks:
                if not rank.dead and not rank.channel.put(Stop()):
                    monitor.wake()
            monitor.changed.notify_all()
        try:
            end = time.monotonic() + grace_s
            for rank in self._ranks:
                if not rank.dead:
                    rank.process.wait(end)
        finally:
            monitor.kill_all()
            monitor.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """`close()`; if an exception leaves the block, the workers are killed at once."""
        self.close(grace_s=2.0 if kind is None else 0.0)


class Handle:
    """The answers of one submitted action."""

    def __init__(self, group: Group, ranks: tuple[int, ...], method: str, *, several: bool) -> None:
        self.ranks = ranks
        self.method = method
        self.replies: list[Reply | None] = [None] * len(ranks)
        self.failures: list[Failure | None] = [None] * len(ranks)
        self._several = several
        self._group = group
        self._values: list[Any] | None = None

    @property
    def done(self) -> bool:
        """Whether all ranks have answered, or one has raised."""
        return all(reply is not None for reply in self.replies) or any(
            reply is not None and isinstance(reply.value, Raised) for reply in self.replies
        )

    def missing(self) -> int:
        """The first rank that has not answered."""
        return next(rank for rank, reply in zip(self.ranks, self.replies, strict=True) if reply is None)

    def result(self, deadline_s: float) -> Any:
        """What the method returned: the value itself if one rank was named by its number, else a list in the order of
        the ranks. May be called again.

        Args:
            deadline_s: seconds to wait at most.

        Raises:
            WorkerError: the action raised on one of its ranks; a rank of the group died or froze, or another rank
                raised and nobody has been told yet; the deadline has passed; the group was closed before.
        """
        self._group.wait_for(self, deadline_s)
        if self._values is None:
            values = [reply.value for reply in self.replies if reply is not None]
            self._values = [pickle.loads(value) for value in values if isinstance(value, bytes)]
        return self._values if self._several else self._values[0]


def _end(deadline_s: float) -> float:
    assert 0 <= deadline_s < math.inf, f"a wait has a deadline of so many seconds, got {deadline_s}"
    return time.monotonic() + deadline_s

"""One rank in this very process: the embedded default."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from plait.errors import LayoutError
from plait.launch.failures import Ended, Failure, WorkerError
from plait.launch.interface import START_DEADLINE_S, Handle, Place, WorkerContext

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # what torch.distributed.Store is


class InProcess:
    """Constructs the worker here. An action runs while it is submitted: there is nothing that it could overlap with,
    and it can be neither killed nor found frozen. What it prints goes where this process prints. Arguments and results
    are handed over as they are, not copied.

    Args:
        heard: called with (0, text) of what the worker tells.
    """

    def __init__(self, *, heard: Callable[[int, str], None] = lambda rank, text: None) -> None:
        self._heard = heard

    def start(
        self,
        worker: Callable[..., Any],
        num_ranks: int,
        *,
        arguments: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        deadline_s: float = START_DEADLINE_S,
    ) -> EmbeddedGroup:
        """See `Launcher.start`. The constructor runs to its end: `deadline_s` bounds workers in other processes."""
        if num_ranks != 1:
            raise LayoutError(
                f"the in-process launcher has one rank, asked for {num_ranks}; launch local processes instead"
            )
        place = Place(0, socket.gethostname())
        context = WorkerContext(0, 1, _memory_store, place, lambda text: self._heard(0, text))
        made = _run("start", lambda: worker(context, *arguments, **(options or {})))
        return EmbeddedGroup(made.result(deadline_s))


class EmbeddedGroup:
    """See `Group`. Made by `InProcess.start`."""

    num_ranks = 1
    bytes_sent = 0
    bytes_received = 0

    def __init__(self, worker: Any) -> None:
        self.pids = (os.getpid(),)
        self._worker = worker

    def submit(self, ranks: int | Sequence[int], method: str, *args: Any, **kwargs: Any) -> EmbeddedHandle:
        """See `Group.submit`. The action has run when this returns."""
        assert self._worker is not None, "the group is closed"
        assert not method.startswith("_"), f"`{method}` is private to the worker"
        several = not isinstance(ranks, int)
        chosen = tuple(ranks) if not isinstance(ranks, int) else (ranks,)
        assert chosen == (0,), f"ranks {ranks} of a group of 1"
        return _run(method, lambda: getattr(self._worker, method)(*args, **kwargs), several=several)

    def signal(self, rank: int, number: int) -> None:
        """See `Group.signal`: to this very process."""
        assert rank == 0, f"rank {rank} of a group of 1"
        os.kill(os.getpid(), number)

    def wait(self, handles: Sequence[Handle], deadline_s: float) -> list[Handle]:
        """See `Group.wait`: all are done."""
        assert handles, "nothing to wait for"
        return list(handles)

    def close(self, grace_s: float = 2.0) -> None:
        """See `Group.close`; `grace_s` bounds workers in other processes."""
        worker, self._worker = self._worker, None
        if worker is not None and hasattr(worker, "close"):
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class EmbeddedHandle:
    """See `Handle`: always done."""

    ranks = (0,)
    done = True

    def __init__(self, method: str, value: Any, failure: Failure | None, error: Exception | None) -> None:
        self.method = method
        self._value = value
        self._failure = failure
        self._error = error

    def result(self, deadline_s: float) -> Any:
        """See `Handle.result`."""
        if self._failure is not None:
            raise WorkerError(self._failure) from self._error
        return self._value


def _run(method: str, action: Callable[[], Any], *, several: bool = False) -> EmbeddedHandle:
    started = time.perf_counter()
    try:
        value = action()
    except Exception as error:  # the worker's boundary; Ctrl-C and SystemExit are this process's own
        seconds = time.perf_counter() - started
        name = "".join(traceback.format_exception_only(error)).strip()
        inner = error.__traceback__
        while inner is not None and inner.tb_next is not None and inner.tb_frame.f_code.co_filename == __file__:
            inner = inner.tb_next
        text = "".join(traceback.format_exception(type(error), error, inner))
        return EmbeddedHandle(method, None, Failure(Ended.RAISED, 0, method, seconds, f"raised {name}", text), error)
    return EmbeddedHandle(method, [value] if several else value, None, None)


def _memory_store() -> Store:
    import torch.distributed as dist

    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]

"""Calls of coroutine functions that a reward worker has under way together, in its one event loop.

Each is answered when it ends. What a call draws is what it would draw alone: whenever the loop goes on with a task that
the call has begun, the random state is the call's. Standard library and its siblings only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import time
from collections.abc import Coroutine, Generator, Sequence
from contextvars import ContextVar
from typing import Any

from plait.rewards.awaiting import event_loop, settled_together
from plait.rewards.seeds import CallDraws, Seeds
from plait.rewards.signature import RewardCall
from plait.rewards.worker import CONCURRENT, Answering, Line

_DRAWS = ContextVar[CallDraws | None]("draws", default=None)
"""Those of the call that a task belongs to; tasks that it begins inherit them."""


class ConcurrentCalls:
    """See the top of the file.

    Args:
        line: to the parent, who sends further calls while some are under way.
    """

    def __init__(self, line: Line, functions: Sequence[RewardCall], seeds: Seeds) -> None:
        self._line, self._functions, self._seeds = line, functions, seeds
        self._under_way: set[asyncio.Task[None]] = set()
        self._loop = event_loop().get_loop()
        self._other: bytes | None = None
        """A request of another kind, which comes when all have been answered."""

    def run(self, data: bytes) -> bytes | None:
        """Answer a request, and all that come until none is under way. Returns one that is to have the process for
        itself, if that has come meanwhile."""
        self._loop.set_task_factory(_task)
        self._loop.add_reader(self._line.fileno(), self._hear)
        self._begin(data)
        try:
            while self._under_way:
                with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task, whose call is told of it
                    self._loop.run_forever()
        finally:
            self._loop.remove_reader(self._line.fileno())
            self._loop.set_task_factory(None)
        return self._other

    def _hear(self) -> None:
        """Begin the call that has been sent."""
        try:
            data = self._line.receive()
        except (EOFError, ConnectionError):
            os._exit(0)
        if data.startswith(CONCURRENT):
            self._begin(data)
        else:
            self._other = data
            self._loop.remove_reader(self._line.fileno())

    def _begin(self, data: bytes) -> None:
        task = self._loop.create_task(self._answer(data.removeprefix(CONCURRENT)))
        self._under_way.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not self._under_way:
            self._loop.stop()

    async def _answer(self, data: bytes) -> None:
        started, call, function = time.perf_counter(), self._line.call, self._line.function
        with Answering() as answering:
            request = pickle.loads(data)
            call, function = request["call"], request["function"]
            draws = self._seeds.of_call(request["noise"])
            _DRAWS.set(draws)
            draws.resume()
            results, ended = answering.begin(self._functions[function], request)
            answering.end(ended(await settled_together(results)))
        self._line.call, self._line.function = call, function
        self._line.end_if_forked(answering.error)
        self._line.send(answering.reply | {"began_s": started, "seconds": time.perf_counter() - started})


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **keys: Any) -> asyncio.Task[Any]:
    draws = (keys["context"].get(_DRAWS) if keys.get("context") is not None else None) or _DRAWS.get()
    return asyncio.Task(coroutine if draws is None else _Drawing(coroutine, draws), loop=loop, **keys)


class _Drawing(Coroutine[Any, Any, Any]):
    """A coroutine of a call, which draws from the call's random state."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], draws: CallDraws) -> None:
        self._coroutine, self._draws = coroutine, draws

    def send(self, value: Any) -> Any:
        self._draws.resume()
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        self._draws.resume()
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

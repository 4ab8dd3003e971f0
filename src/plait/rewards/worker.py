"""A reward worker: a process of its own whose main thread calls reward functions, one call at a time; of coroutine
functions several (`concurrent_calls`).

It reads pickled requests from its parent and answers in JSON; an answer says which call it is of, and which process
gave it. It dies with its parent, at once and whatever its functions are doing, and before its parent where memory runs
out. Imports the standard library and its siblings of the same kind only, so that it starts in a blink.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from plait.errors import ConfigError
from plait.orphan_guard import begin_as_child
from plait.rewards.awaiting import settled
from plait.rewards.call_results import Logged, check_scores
from plait.rewards.loading import load_file, load_function
from plait.rewards.seeds import Seeds
from plait.rewards.signature import Begun, Miscounted, RewardCall
from plait.user_code import UserCode, own_frames, said_by

IN_WORKER = "PLAIT_REWARD_WORKER"
"""Environment variable set in workers: a script that a worker loads must not start a run of its own."""


CONCURRENT = b"+"
"""What a request begins with that may be under way with others."""
AT_IMPORT = -1
"""In place of a function's number, and of a call's: while the functions' files are imported."""


def main(connection_fd: int, guard_fd: int, crash_fd: int, strays_fd: int, memory_bytes: int) -> None:
    """Serve until the parent closes the connection.

    Args:
        strays_fd: takes one line for each forked child that came back, see `Line`.
        memory_bytes: see `bound_memory`; 0: no bound.
    """
    begin_as_child(guard_fd, crash_fd)
    bound_memory(memory_bytes)
    line = Line(connection_fd, strays_fd)
    try:
        seeds = Seeds()
        functions = _load(line)
        while functions is not None:
            _answer(line, functions, seeds)
    except (EOFError, ConnectionError):
        pass
    os._exit(0)  # threads that a function left behind must not keep the process


def bound_memory(limit_bytes: int) -> None:
    """Have this process, and what it starts, end before others where memory runs out, and bound the data of each.

    What is bound is the data of a process (`RLIMIT_DATA`: private memory that it may write), not its address space, of
    which libraries reserve many times what they use. Beyond it an allocation fails: Python raises MemoryError.
    """
    with contextlib.suppress(OSError):  # there is none where this is no Linux
        Path("/proc/self/oom_score_adj").write_text("1000")
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


class Line:
    """The connection to the parent, of this process alone.

    A function may fork, or run code that does, and the child may come back from it as its parent does. Such a child has
    no connection (it is closed in it), so that it can neither answer nor take calls away; when it comes back it says so
    on a pipe and ends.
    """

    def __init__(self, connection_fd: int, strays_fd: int) -> None:
        self._connection = Connection(connection_fd)
        self._strays_fd = strays_fd
        self._pid = os.getpid()
        self.call = self.function = AT_IMPORT
        """What is under way: the number of the call, the place of its function."""
        os.register_at_fork(after_in_child=self._connection.close)

    def fileno(self) -> int:
        """What there is to read when a request has come."""
        return self._connection.fileno()

    def receive(self) -> bytes:
        self.end_if_forked()
        return self._connection.recv_bytes()

    def send(self, message: dict[str, Any]) -> None:
        self.end_if_forked()
        message |= {"call": self.call, "pid": self._pid}
        self._connection.send_bytes(json.dumps(message, default=str).encode())

    def end_if_forked(self, error: BaseException | None = None) -> None:
        """End this process if it is not the worker; not a word of one that means to end (`sys.exit`)."""
        if os.getpid() == self._pid:
            return
        if not isinstance(error, SystemExit):
            os.write(self._strays_fd, f"{self.function}\n".encode())
        os._exit(0)


class _Unpickler(pickle.Unpickler):
    """Finds what the parent's script defined, by importing that script under another name."""

    def __init__(self, data: bytes, main_file: str | None) -> None:
        super().__init__(io.BytesIO(data))
        self._main_file = main_file

    def find_class(self, module: str, name: str) -> Any:
        if module != "__main__" or self._main_file is None:
            return super().find_class(module, name)
        value: Any = load_file(Path(self._main_file))
        for part in name.split("."):
            value = getattr(value, part)
        return value


def _load(line: Line) -> list[RewardCall] | None:
    """Load the functions that the first message names; None, after a report, if one cannot be loaded."""
    start = pickle.loads(line.receive())
    sys.argv = start["argv"]
    functions: list[RewardCall] = []
    for name, target in start["functions"]:
        try:
            with UserCode("it cannot be loaded", ConfigError):
                if isinstance(target, str):
                    loaded = load_function(target)
                else:
                    loaded = _Unpickler(target, start["main_file"]).load()
                functions.append(RewardCall(name, loaded))
        except ConfigError as error:
            line.end_if_forked(error.__cause__)
            line.send({"unloadable": name, "error": str(error), "frames": error.frames})
            return None
    line.send({"ready": [asdict(function.signature) for function in functions]})
    return functions


def _answer(line: Line, functions: list[RewardCall], seeds: Seeds) -> None:
    """Take one request and answer it, and all before it that may be under way together."""

    data = line.receive()
    while data.startswith(CONCURRENT):
        from plait.rewards.concurrent_calls import ConcurrentCalls  # slow to import, and workers must start in a blink

        data = ConcurrentCalls(line, functions, seeds).run(data) or line.receive()

    def begin(request: dict[str, Any]) -> RewardCall:
        line.call, line.function = request["call"], request["function"]
        seeds.seed(request["noise"])
        return functions[line.function]

    started = time.perf_counter()
    reply, error = reply_to(data, begin)
    line.end_if_forked(error)
    line.send(reply | {"began_s": started, "seconds": time.perf_counter() - started})


class Answering:
    """While inside, a request is answered; whatever the function raises is reported, SystemExit too."""

    def __init__(self) -> None:
        self.reply: dict[str, Any] = {}
        """What JSON can hold: scores (finite or None) and faults by place, and what was logged; or an error."""
        self.error: BaseException | None = None
        """What the function raised, if it did."""
        self._logs = Logged()
        self._turns: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        if isinstance(error, Miscounted):
            self.reply = {"error": str(error), "miscounted": True}
        elif error is not None:
            self.reply = {"error": f"raised {said_by(error)}{_bound(error)}", "traceback": own_frames(error)}
        return True

    def begin(self, function: RewardCall, request: dict[str, Any]) -> Begun:
        """Call the function."""
        self._turns = request["turns"]
        return function.begun(request["arguments"], request["texts"], self._logs.functions)

    def end(self, result: Any) -> None:
        """The function has given this."""
        reply = check_scores(result, self._turns)
        self._logs.check(len(self._turns))
        reply |= {"extras": self._logs.extras, "metrics": self._logs.metrics}
        json.dumps(reply, default=str)
        self.reply = reply


def reply_to(data: bytes, begin: Callable[[dict[str, Any]], RewardCall]) -> tuple[dict[str, Any], BaseException | None]:
    """The reply to a pickled request, and what the function raised, if it did.

    Args:
        begin: gets the request, and gives the function.
    """
    with Answering() as answering:
        request = pickle.loads(data)
        results, ended = answering.begin(begin(request), request)
        answering.end(ended(settled(results)))
    return answering.reply, answering.error


def _bound(error: BaseException) -> str:
    """The limit of memory, where that may be the cause."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not isinstance(error, MemoryError) or limit == resource.RLIM_INFINITY:
        return ""
    return f": the limit is {limit / 1e9:g} GB (`reward.memory_gb`)"

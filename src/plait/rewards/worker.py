"""A reward worker: a process of its own whose main thread calls reward functions, one call at a time.

It reads pickled requests from its parent and answers in JSON; an answer says which call it is of, and which process
gave it. It dies with its parent, at once and whatever its functions are doing, and before its parent where memory runs
out. Imports the standard library and its siblings of the same kind only, so that it starts in a blink.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib.abc
import io
import json
import math
import os
import pickle
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from plait.errors import ConfigError
from plait.metric_names import problem_of
from plait.orphan_guard import die_with
from plait.rewards.loading import load_file, load_function
from plait.rewards.signature import Miscounted, RewardCall, listed
from plait.user_code import UserCode, own_frames, said_by

_SEEDED = ("numpy", "torch")
"""Libraries with random state of their own, besides the standard library."""

IN_WORKER = "PLAIT_REWARD_WORKER"
"""Environment variable set in workers: a script that a worker loads must not start a run of its own."""


AT_IMPORT = -1
"""In place of a function's number, and of a call's: while the functions' files are imported."""


def main(connection_fd: int, guard_fd: int, crash_fd: int, strays_fd: int, memory_bytes: int) -> None:
    """Serve until the parent closes the connection.

    Args:
        strays_fd: takes one line for each forked child that came back, see `Line`.
        memory_bytes: see `bound_memory`; 0: no bound.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(guard_fd)
    bound_memory(memory_bytes)
    faulthandler.enable(crash_fd, all_threads=False)
    faulthandler.register(signal.SIGUSR1, crash_fd, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what a function printed before it was killed is not lost
    line = Line(connection_fd, strays_fd)
    try:
        seeds = _Seeds()
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
        found: Any = load_file(Path(self._main_file))
        for part in name.split("."):
            found = getattr(found, part)
        return found


def _load(line: Line) -> list[RewardCall] | None:
    """Load the functions that the first message names; None, after a report, if one cannot be loaded."""
    start = pickle.loads(line.receive())
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


def _answer(line: Line, functions: list[RewardCall], seeds: _Seeds) -> None:
    """Take one request and answer it."""

    def begin(request: dict[str, Any]) -> RewardCall:
        line.call, line.function = request["call"], request["function"]
        seeds.seed(request["noise"])
        return functions[line.function]

    data = line.receive()
    started = time.perf_counter()
    reply, error = reply_to(data, begin)
    line.end_if_forked(error)
    line.send(reply | {"began_s": started, "seconds": time.perf_counter() - started})


def reply_to(data: bytes, begin: Callable[[dict[str, Any]], RewardCall]) -> tuple[dict[str, Any], BaseException | None]:
    """The reply to a pickled request, which JSON can hold: scores (finite or None) and faults by place, and what was
    logged; or an error. And what the function raised, if it did.

    Args:
        begin: gets the request, and gives the function.
    """
    logs = Logged()
    try:
        request = pickle.loads(data)
        function = begin(request)
        count = len(request["texts"])
        reply = check_scores(function(request["arguments"], request["texts"], logs.functions), count)
        logs.check(count)
        reply |= {"extras": logs.extras, "metrics": logs.metrics}
        json.dumps(reply, default=str)
    except Miscounted as error:
        return {"error": str(error), "miscounted": True}, error
    except BaseException as error:  # the boundary: whatever a user's function raises is reported, SystemExit too
        return {"error": f"raised {said_by(error)}{_bound(error)}", "traceback": own_frames(error)}, error
    return reply, None


def _bound(error: BaseException) -> str:
    """The limit of memory, where that may be the cause."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not isinstance(error, MemoryError) or limit == resource.RLIM_INFINITY:
        return ""
    return f": the limit is {limit / 1e9:g} GB (`reward.memory_gb`)"


class Logged:
    """What a function logs in one call."""

    def __init__(self) -> None:
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}

    @property
    def functions(self) -> dict[str, Callable[..., None]]:
        """`log_extra` and `log_metric`, as functions ask for them."""
        return {"log_extra": self._extra, "log_metric": self._metric}

    def check(self, num_samples: int) -> None:
        """Raises Miscounted where a column has another number of values than there are samples."""
        for column, values in self.extras.items():
            if len(values) != num_samples:
                raise Miscounted(f"log_extra({column!r}) gave {len(values)} values for {num_samples} samples")

    def _extra(self, column: str, values: Any) -> None:
        """Raises TypeError: there are no values, one per sample."""
        if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
            raise TypeError(
                f"log_extra({column!r}, …): expected a list with one value per sample, found {_kind(values)}"
            )
        self.extras[str(column)] = [listed(one) for one in values]

    def _metric(self, name: str, value: Any) -> None:
        """Raises ValueError: the name is none of a metric, or the value is no finite number."""
        if (problem := problem_of(name)) is not None:
            raise ValueError(f"log_metric: {problem}")
        number = _number(listed(value))
        if number is None or not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}, …): expected a finite number, found {_kind(value)}")
        self.metrics.setdefault(name, []).append(number)


def check_scores(result: Any, num_samples: int) -> dict[str, Any]:
    """{"scores", "faults"} of what a function returned, or {"error"} when no place can be blamed.

    `scores` has a finite number or None for each sample; `faults` says, for each place that has neither, what it has.
    """
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__len__") or not hasattr(result, "__getitem__"):
        return {"error": f"returned {_kind(result)}, expected a list of {num_samples} numbers", "miscounted": True}
    if len(result) != num_samples:
        return {"error": f"returned {len(result)} scores for {num_samples} samples", "miscounted": True}
    scores: list[float | None] = []
    faults: dict[int, str] = {}
    for place in range(num_samples):
        value = result[place]
        scores.append(None)
        if value is None:
            continue
        number = _number(value)
        if number is None:
            faults[place] = f"returned {_kind(value)} where a number or None is expected"
            continue
        if math.isfinite(number):
            scores[place] = number
        else:
            faults[place] = f"returned {number}, which is no score; return None where the function does not apply"
    return {"scores": scores, "faults": faults}


def _number(value: Any) -> float | None:
    """A value as a number; None: it is none."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several numbers: RuntimeError
        return None


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"


class _Seeds(importlib.abc.MetaPathFinder):
    """The random state of a call, a function of its noise alone: whichever worker makes it, whatever went before, and
    after a resume. It covers `random`, NumPy's global generator and torch's, each from the moment when it is there: a
    library that the function itself imports is seeded when its import ends. While the functions' files are imported the
    state is a fixed one. A generator of the user's own is not covered, nor is what `numpy.random.default_rng()` draws
    from the system.
    """

    def __init__(self) -> None:
        sys.meta_path.insert(0, self)
        self.seed("import")

    def seed(self, noise: str) -> None:
        self._noise = noise
        random.seed(noise)
        for name in _SEEDED:
            if name in sys.modules:
                self._seed_library(name)

    def _seed_library(self, name: str) -> None:
        library = sys.modules[name]
        number = int.from_bytes(hashlib.blake2b(self._noise.encode(), digest_size=4).digest(), "little")
        if name == "numpy":
            library.random.seed(number)
        else:
            library.manual_seed(number)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _SEEDED:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_seed(module: ModuleType) -> None:
            state = random.getstate()
            execute(module)
            random.setstate(state)  # whatever the import drew, only the first call would have drawn it
            self._seed_library(fullname)

        spec.loader.exec_module = execute_and_seed
        return spec

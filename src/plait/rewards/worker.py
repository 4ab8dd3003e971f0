"""A reward worker: a process of its own whose main thread calls reward functions, one call at a time.

It reads pickled requests from its parent and answers in JSON. It dies with its parent, at once and whatever its
functions are doing. Imports the standard library and its siblings of the same kind only, so that it starts in a blink.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.abc
import io
import json
import math
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from plait.errors import ConfigError
from plait.lifeline import die_with
from plait.rewards import signature
from plait.rewards.loading import load_file, load_function
from plait.rewards.signature import Miscounted, RewardCall, listed

_SEEDED = ("numpy", "torch")
"""Libraries with random state of their own, besides the standard library."""

_OWN_FILES = (__file__, signature.__file__)

MAX_TRACEBACK = 6000
"""Characters of a traceback that are reported, its end."""

IN_WORKER = "PLAIT_REWARD_WORKER"
"""Environment variable set in workers: a script that a worker loads must not start a run of its own."""


def main(connection_fd: int, lifeline_fd: int, crash_fd: int) -> None:
    """Serve until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(lifeline_fd)
    faulthandler.enable(crash_fd, all_threads=False)
    faulthandler.register(signal.SIGUSR1, crash_fd, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what a function printed before it was killed is not lost
    connection = Connection(connection_fd)
    try:
        seeds = _Seeds()
        functions = _load(connection)
        while functions is not None:
            _answer(connection, functions, seeds)
    except (EOFError, ConnectionError):
        pass
    os._exit(0)  # threads that a function left behind must not keep the process


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


def _load(connection: Connection) -> list[RewardCall] | None:
    """Load the functions that the first message names; None, after a report, if one cannot be loaded."""
    start = pickle.loads(connection.recv_bytes())
    functions: list[RewardCall] = []
    for name, target in start["functions"]:
        try:
            loaded = load_function(target) if isinstance(target, str) else _Unpickler(target, start["main_file"]).load()
            functions.append(RewardCall(name, loaded))
        except ConfigError as error:
            _send(connection, {"unloadable": name, "error": str(error), "traceback": ""})
            return None
        except BaseException as error:  # whatever the user's file raises while it is imported
            _send(connection, {"unloadable": name, "error": _short(error), "traceback": _traceback(error)})
            return None
    _send(connection, {"ready": [asdict(function.signature) for function in functions]})
    return functions


def _answer(connection: Connection, functions: list[RewardCall], seeds: _Seeds) -> None:
    """Take one request and answer it. The reply holds scores (finite or None) and faults by place, or an error."""
    data = connection.recv_bytes()
    started = time.perf_counter()
    extras: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    logs: dict[str, Callable[..., None]] = {
        "log_extra": lambda column, values: extras.__setitem__(str(column), [listed(one) for one in values]),
        "log_metric": lambda name, value: metrics.setdefault(str(name), []).append(float(value)),
    }
    reply: dict[str, Any]
    try:
        request = pickle.loads(data)
        function = functions[request["function"]]
        seeds.seed(request["noise"])
        reply = check_scores(function(request["arguments"], request["texts"], logs), len(request["texts"]))
        for column, values in extras.items():
            if len(values) != len(request["texts"]):
                raise Miscounted(f"log_extra({column!r}) gave {len(values)} values for {len(request['texts'])} samples")
    except Miscounted as error:
        reply = {"error": str(error), "miscounted": True}
    except BaseException as error:  # the boundary: whatever a user's function raises is reported, SystemExit too
        reply = {"error": f"raised {_short(error)}", "traceback": _traceback(error)}
    reply |= {"extras": extras, "metrics": metrics, "seconds": time.perf_counter() - started}
    _send(connection, reply)


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
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            faults[place] = f"returned {_kind(value)} where a number or None is expected"
            continue
        if math.isfinite(number):
            scores[place] = number
        else:
            faults[place] = f"returned {number}, which is no score; return None where the function does not apply"
    return {"scores": scores, "faults": faults}


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


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message, default=str).encode())


def _short(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[-1000:]


def _traceback(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:  # the user's frames alone
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))[-MAX_TRACEBACK:]

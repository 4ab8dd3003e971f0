"""Seconds per phase, peak memory, and the pipe between a side's process and the one that compares."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any

PHASES = ("generation", "reference", "training", "optimizer", "other")


@dataclass
class Seconds:
    wall: float = 0.0
    cpu: float = 0.0
    """Process time, all threads."""


class Stopwatch:
    """Attributes every moment of a step to one phase; a phase entered within another interrupts it."""

    def __init__(self, phases: Sequence[str] = PHASES) -> None:
        self._names = phases
        self.phases = {name: Seconds() for name in phases}
        self._open = ["other"]
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def enter(self, phase: str) -> None:
        self._charge(self._open[-1])
        self._open.append(phase)

    def leave(self, phase: str | None = None) -> None:
        """Leave the innermost phase; its time since the last change goes to `phase` when only the end tells which."""
        innermost = self._open.pop()
        self._charge(phase or innermost)
        assert self._open, "a phase was left that was not entered"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def restart(self) -> None:
        """Begin a step: what went before is nobody's."""
        assert len(self._open) == 1, f"phase {self._open[-1]} is open"
        self.phases = {name: Seconds() for name in self._names}
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> dict[str, Seconds]:
        """End a step."""
        self._charge(self._open[-1])
        return self.phases

    def timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return call

    def _charge(self, phase: str) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what the phase has launched is its own
        wall, cpu = time.perf_counter(), time.process_time()
        self.phases[phase].wall += wall - self._wall
        self.phases[phase].cpu += cpu - self._cpu
        self._wall, self._cpu = wall, cpu


@dataclass
class StepReport:
    """What a side says about one step."""

    phases: dict[str, Seconds]
    prompt_lengths: list[int]
    """Tokens of each sample's prompt, in the order of the workload."""
    response_lengths: list[int]
    scored_tokens: int
    """Positions that the reference forward computed, padding included."""
    trained_tokens: int
    """The same of the training forward."""
    max_rss_bytes: int = field(default_factory=lambda: max_rss_bytes())

    @classmethod
    def of(cls, raw: dict[str, Any]) -> StepReport:
        return cls(**{**raw, "phases": {name: Seconds(**seconds) for name, seconds in raw["phases"].items()}})


@dataclass
class Ready:
    """A side has loaded its models."""

    imported_bytes: int
    """Peak resident memory after the imports."""
    loaded_bytes: int
    """After loading; what it took to load may be higher than what stays."""


class Channel:
    """A side's end of the pipe: one line in starts a step, one line out reports it.

    What libraries print goes to stderr from now on.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, message: Ready | StepReport) -> None:
        print(json.dumps(asdict(message)), file=self._out, flush=True)

    def wait(self) -> None:
        """Until the next step may begin; leaves the process when nobody is there any more."""
        if not sys.stdin.readline():
            raise SystemExit(0)


def max_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""A side's end of the pipe: it loads once, then runs the cases it is asked for. Standard library only."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from generation.workload import Case, Workload


@dataclass
class Loaded:
    """The side is ready for its first case."""

    imported_bytes: int
    """Resident memory of this process after the imports."""
    versions: str


@dataclass
class Outcome:
    """What the engine did in one run of a case."""

    response_lengths: list[int]
    """Tokens delivered of each sample, in the order of the case."""
    row_steps: int
    """Rows of decode steps that were computed, padding included; 0: the engine does not tell."""
    steps: list[Step] = field(default_factory=list)
    """One by one, where the engine tells."""
    packing_s: float = 0.0
    """What it took to lay the weights out anew, where the engine tells; in no step's seconds."""

    @classmethod
    def of(cls, raw: dict[str, Any]) -> Outcome:
        return cls(**{**raw, "steps": [Step(**step) for step in raw["steps"]]})


@dataclass
class Step:
    batch: int
    """Sequences."""
    context: int
    """Tokens they held before."""
    tokens: int
    """That went through the model."""
    seconds: float


Runner = Callable[[Case, int], Any]
"""Generates a case and returns its `Outcome` (the machine's side: another dataclass). The number says which time a case
is asked for, for fresh noise."""


def serve(load: Callable[[Workload], tuple[Runner, str]]) -> None:
    """Load, say so, and answer one line with the key of a case by one line with seconds and outcome, until the pipe
    is closed.

    Args:
        load: returns what runs a case, and the versions of the libraries. Called after the imports.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    imported = resident_bytes()
    workload = Workload.load(Path(sys.argv[1]))
    run, versions = load(workload)
    print(json.dumps(asdict(Loaded(imported, versions))), file=out, flush=True)
    for number, line in enumerate(sys.stdin):
        case = workload.cases[line.strip()]
        started = time.perf_counter()
        outcome = run(case, number)
        wall_s = time.perf_counter() - started
        print(json.dumps({"wall_s": wall_s, "outcome": asdict(outcome)}), file=out, flush=True)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

"""The sides as the comparing process sees them: spawned, asked, and stopped while another one is timed.

A side may be several processes (vLLM's engine is one of its own): they share a session, whose CPU time and peak memory
are summed. Linux only, for it reads /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sides import SideError

from generation.serving import Loaded

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_FORGET_PEAK = "5"
"""Written to clear_refs: the peak of the resident memory begins anew (proc(5))."""
_PR_SET_PDEATHSIG = 1


@dataclass
class Timed:
    """One run of a case."""

    wall_s: float
    cpu_s: float
    """Of all processes of the side."""
    peak_bytes: int
    """Resident during the run; summed over processes, so pages that they share count twice."""
    outcome: dict[str, Any]
    """As the side sent it."""


@dataclass
class Engine:
    """How to start a side."""

    name: str
    module: str
    python: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class Process:
    """A side. Use as a context manager, so that nothing of it is left.

    Args:
        deadline_s: for loading and for each run.

    Raises:
        SideError: it died or missed its deadline; here or in `run`.
    """

    def __init__(self, engine: Engine, workload_file: Path, threads: int, log_file: Path, deadline_s: float) -> None:
        self.name = engine.name
        self._log_file = log_file
        self.deadline_s = deadline_s
        folder = Path(__file__).resolve().parents[1]
        paths = [str(folder), str(folder.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        fixed = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
        fixed |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)}
        with open(log_file, "wb") as log:
            self._process = subprocess.Popen(
                [str(engine.python), "-m", engine.module, str(workload_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env={**os.environ, **fixed, **engine.environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        try:
            self.loaded = Loaded(**self._receive())
            self._signal(signal.SIGSTOP)
        except SideError:
            self.close()
            raise

    def run(self, key: str) -> Timed:
        """Run a case, the others being stopped."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        pids = self.pids()
        for pid in pids:
            _write(f"/proc/{pid}/clear_refs", _FORGET_PEAK)
        before = _cpu_s(pids)
        with contextlib.suppress(BrokenPipeError):  # it died, which `_receive` says with the end of its output
            self._process.stdin.write(f"{key}\n".encode())
        answer = self._receive()
        pids = self.pids()
        timed = Timed(answer["wall_s"], _cpu_s(pids) - before, sum(_peak_bytes(pid) for pid in pids), answer["outcome"])
        self._signal(signal.SIGSTOP)
        return timed

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> dict:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], self.deadline_s)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            what = "ended" if readable else f"gave no answer for {self.deadline_s:.0f} s"
            tail = self._log_file.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise SideError(f"{self.name} {what}; the end of its output:\n{tail}")
        return json.loads(line)

    def pids(self) -> list[int]:
        """Of the session that began with the side."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        stat = _stat(pid)
        return bool(stat) and int(stat[3]) == self._process.pid

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (session is the fourth of them); none if it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_s(pids: Sequence[int]) -> float:
    """Of user and system, children that have ended included."""
    return sum(sum(map(int, stat[11:15])) for stat in map(_stat, pids) if stat) / _TICKS_PER_S


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _write(path: str, text: str) -> None:
    with contextlib.suppress(OSError):  # it has gone
        Path(path).write_text(text, encoding="ascii")

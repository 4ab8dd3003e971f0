"""The parent's side of one reward worker: start, connection, death and its cause."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from plait.memory_limits import KernelKills
from plait.rewards.worker import IN_WORKER

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from plait.rewards.worker import main; main(*map(int, sys.argv[2:]))"
)
_TRACE_WAIT_S = 0.5


class RewardProcess:
    """A running worker. Not the standard `multiprocessing.Process`, whose spawn would run the user's script again and
    import all that it imports. It has a session of its own: Ctrl-C in the terminal does not reach it.

    Args:
        output: file to which its prints are appended; None: stderr.
        memory_bytes: most data that it may have, see `worker.bound_memory`; None: no limit.
    """

    def __init__(self, start_message: bytes, output: Path | None, memory_bytes: int | None) -> None:
        ours, theirs = socket.socketpair()
        life_read, self._guard = os.pipe()
        self._strays, strays = os.pipe()
        os.set_blocking(self._strays, False)
        self._last_strays: list[int] = []
        """Process ids of strays that were there when the worker was killed."""
        self._crash_file = tempfile.TemporaryFile()  # noqa: SIM115  closed in kill()
        fds = (theirs.fileno(), life_read, self._crash_file.fileno(), strays)
        # One thread each and a fixed hash seed: workers share cores with training, and give the same scores again.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", IN_WORKER: "1"}
        paths = json.dumps([path for path in sys.path if isinstance(path, str)])
        self._kills = KernelKills()
        with open(output, "ab") if output else contextlib.nullcontext(2) as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, paths, *map(str, (*fds, memory_bytes or 0))],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=fds,
                env=environment,
                start_new_session=True,
            )
        theirs.close()
        os.close(life_read)
        os.close(strays)
        self.connection = Connection(ours.detach())
        with contextlib.suppress(ConnectionError):  # a worker dead so soon is found by `exited`
            self.connection.send_bytes(start_message)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exited(self) -> bool:
        return self._process.poll() is not None

    def receive(self) -> dict[str, Any]:
        """The next reply. Raises EOFError or OSError if the worker is dead, ValueError if it is no reply."""
        reply = json.loads(self.connection.recv_bytes())
        if not isinstance(reply, dict):
            raise ValueError(f"expected a reply, found {reply!r:.60}")
        return reply

    def strays(self) -> list[int]:
        """For each forked child that has come back to the worker's own code since the last look the place of the
        function that forked it; −1: a file did, while it was imported."""
        pids, self._last_strays = self._last_strays, []
        if self._guard >= 0:
            with contextlib.suppress(BlockingIOError):
                lines = os.read(self._strays, 4096).decode(errors="replace").split()
                pids += [int(line) for line in lines if re.fullmatch(r"-1|\d{1,6}", line)]
        return pids

    def where(self) -> str:
        """Kill a worker that took too long, and return the stack at which it was, as far as it can be had."""
        self._crash_file.seek(0, os.SEEK_END)
        before = self._crash_file.tell()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _TRACE_WAIT_S
        while time.monotonic() < deadline and os.fstat(self._crash_file.fileno()).st_size == before:
            time.sleep(0.01)
        self._crash_file.seek(before)
        stack = self._crash_file.read().decode(errors="replace")
        self.kill()
        return stack

    def cause_of_death(self) -> tuple[str, str]:
        """(what happened in words, the Python stack of a crash if there is one), after making sure it is dead."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        self._crash_file.seek(0)
        stack = self._crash_file.read().decode(errors="replace")
        self.kill()
        code = self._process.returncode
        if code is not None and code < 0:
            name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
            return f"killed its worker process ({name}{self._kills.words() if name == 'SIGKILL' else ''})", stack
        return f"ended its worker process (exit code {code})", stack

    def kill(self) -> None:
        """Kill the process and whatever it started, and wait until it is gone. Harmless when done before."""
        if self._guard < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=10.0)
        self._last_strays = self.strays()
        self.connection.close()
        os.close(self._guard)
        os.close(self._strays)
        self._guard = -1
        self._crash_file.close()

"""The controller's side of one worker process: start, output, the cause of its death, and its certain end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from plait.errors import ConfigError
from plait.memory_limits import KernelKills

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from plait.launch.worker import main; main(*map(int, sys.argv[2:]))"
)
_BOOT_ELSEWHERE = (
    "import sys; from importlib import util; folder = sys.argv[1]; "
    "spec = util.spec_from_file_location('plait', folder + '/__init__.py', submodule_search_locations=[folder]); "
    "sys.modules['plait'] = plait = util.module_from_spec(spec); spec.loader.exec_module(plait); "
    "from plait.launch.worker import main; main(*map(int, sys.argv[2:]))"
)
"""The program for another environment's Python: it loads plait's own files, and nothing of what is installed beside
them."""
_DUMP_WAIT_S = 0.5
_DUMP_STILL_S = 0.05  # a stack is written line by line, and what writes it may lose its core between two
_TAIL_LINES = 20
_TAIL_BYTES = 4000
_KILL_WAIT_S = 10.0


def check_processes() -> None:
    """Raises ConfigError where this Python cannot look after processes of ranks."""
    if not hasattr(os, "waitid"):
        raise ConfigError(
            "processes of ranks need Python 3.13 or newer on macOS, found "
            f"{platform.python_version()}; take another Python (a run with `devices` 1 has none)"
        )


class WorkerProcess:
    """A running process, in a session of its own: Ctrl-C in the terminal does not reach it.

    Args:
        key: the group's, handed over on stdin: neither arguments nor environment show it.
        environment: variables over those of this process.
        output_file: to which its stdout and stderr are appended; None keeps them for `output` only.
        folder: its working directory, if it exists; else that of this process.
        python: interpreter of another environment, whose packages it uses in place of this process's.
        silent_after_s: whole seconds without a `beat` after which it ends by itself; 0: never.

    Raises:
        ConfigError: see `check_processes`.
    """

    def __init__(
        self,
        key: bytes,
        environment: Mapping[str, str],
        output_file: Path | None,
        folder: Path | None = None,
        *,
        python: Path | None = None,
        silent_after_s: int = 0,
    ) -> None:
        check_processes()
        self._output_file = output_file
        self.link, theirs = socket.socketpair()
        life_read, self._guard = os.pipe()
        beats_read, beats_write = os.pipe()
        os.set_blocking(beats_write, False)
        self._beats = open(beats_write, "wb", buffering=0)  # noqa: SIM115  closed in kill()
        self._crash_file = tempfile.TemporaryFile()  # noqa: SIM115  closed in kill()
        self._dumped = 0  # bytes of the crash file that are no crash
        self._output = open(output_file, "ab+") if output_file else tempfile.TemporaryFile()  # noqa: SIM115
        self._output_start = self._output.seek(0, os.SEEK_END)
        fds = [theirs.fileno(), life_read, self._crash_file.fileno(), beats_read]
        self._kills = KernelKills()
        self._process = subprocess.Popen(
            [*_interpreter(python), *map(str, (*fds, silent_after_s))],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            pass_fds=fds,
            env=os.environ | dict(environment),
            cwd=folder if folder is not None and folder.is_dir() else None,
            start_new_session=True,
        )
        theirs.close()
        os.close(life_read)
        os.close(beats_read)
        assert self._process.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(BrokenPipeError):  # dead so soon: found by `exited`
            self._process.stdin.write(key)
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def doubtful(self) -> bool:
        """Its machine is this one."""
        return False

    @property
    def exited(self) -> bool:
        """Whether it has ended. It stays a zombie, so that its number is no one else's, until `kill`."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped by someone else
            return True

    def wait(self, deadline: float) -> bool:
        """Whether it has ended by `deadline` (of time.monotonic)."""
        while not self.exited:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True

    def state(self) -> str:
        """What the kernel says about a process that does not answer."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""
        meanings = {"T": "it is stopped by a signal", "t": "a debugger has stopped it", "D": "it waits for a device"}
        return meanings.get(letter, "it does not let its other threads run")

    def dump_stack(self, *, stopped: bool = False) -> str:
        """The stack of its main thread, by a signal. A process that is stopped is woken for that; kill it after."""
        before = self._crash_size()
        with contextlib.suppress(ProcessLookupError):
            _signal_main_thread(self.pid, signal.SIGUSR1)
            if stopped:
                os.kill(self.pid, signal.SIGCONT)
        size, grown = before, time.monotonic()
        deadline = grown + _DUMP_WAIT_S
        while (now := time.monotonic()) < deadline and (size == before or now < grown + _DUMP_STILL_S):
            time.sleep(0.005)
            if self._crash_size() != size:
                size, grown = self._crash_size(), now
        text, self._dumped = self._crash_text(before), self._crash_size()
        return text

    def cause_of_death(self) -> tuple[str, str]:
        """(what happened, in words that follow the rank; the Python stack of a crash, if there is one)."""
        if not self.wait(time.monotonic() + 1.0):
            return "closed its connection and was killed", ""
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            status = None
        stack = self._crash_text(self._dumped)
        if status is None:
            return "died", stack
        if status.si_code == os.CLD_EXITED:
            return f"ended its process (exit code {status.si_status})", stack
        code = status.si_status
        name = signal.Signals(code).name if code in list(signal.Signals) else f"signal {code}"
        return f"was killed by {name}{self._kills.words() if name == 'SIGKILL' else ''}", stack

    def output(self) -> tuple[str, str]:
        """See `node.Process`."""
        return self._last_lines(), str(self._output_file or "")

    def _last_lines(self) -> str:
        if self._output.closed:
            return ""
        end = os.fstat(self._output.fileno()).st_size
        start = max(self._output_start, end - _TAIL_BYTES)
        text = os.pread(self._output.fileno(), max(0, end - start), start).decode(errors="replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def send_signal(self, number: int) -> None:
        """Send a signal to the process itself; nothing happens if it has ended."""
        if not self.exited:
            os.kill(self.pid, number)

    def beat(self) -> None:
        """Let it hear that this process runs."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, or another thread ends it
            self._beats.write(b".")  # nothing where it is stopped and the pipe is full

    def signal_group(self) -> None:
        """Kill the process and whatever it started, but in a session of its own; see `kill`."""
        if self._guard >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        """`signal_group`, and wait until the process is gone. Harmless when done before."""
        if self._guard < 0:
            return
        self.signal_group()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, on a dead disk: it ends when that does
            self._process.wait(timeout=_KILL_WAIT_S)
        self.link.close()
        os.close(self._guard)
        self._beats.close()
        self._guard = -1
        self._crash_file.close()
        self._output.close()

    def _crash_size(self) -> int:
        return os.fstat(self._crash_file.fileno()).st_size

    def _crash_text(self, start: int) -> str:
        return os.pread(self._crash_file.fileno(), self._crash_size() - start, start).decode(errors="replace")


def _interpreter(python: Path | None) -> list[str]:
    """What begins the command of a worker."""
    if python is None:
        return [sys.executable, "-c", _BOOT, json.dumps([path for path in sys.path if isinstance(path, str)])]
    return [str(python), "-P", "-c", _BOOT_ELSEWHERE, str(Path(__file__).parents[1])]


def _signal_main_thread(pid: int, number: int) -> None:
    """Signal the main thread: of a stopped process, any thread would take a signal when it is woken."""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None) if sys.platform == "linux" else None
    if tgkill is None:
        os.kill(pid, number)
    else:
        tgkill(pid, pid, number)

"""Processes that tests start begin warm: as forks of one that has imported torch and the models of Transformers, or,
where they score with reward functions, what these processes import.

Of what a test of several processes computes, importing is most: seven seconds in each. Here `subprocess.Popen` has a
process of ours begin in a fork of a *template*, which has imported, has computed once what these processes compute
(`rehearsal`), and does nothing but wait. It is a process as any other: with memory, arguments, environment, folder,
files and session of its own, and a child of the one that starts it (`CLONE_PARENT`), which waits for it and reads its
end as always. Four things differ: `/proc/PID/environ` and `cmdline` are the template's, no file is forced to disk
(`disk`), what the template has imported is not taken down at the end, and what a module does when it is imported was
done before, so that variables which are read then must be the template's. Where they are not, and for all other
commands, a process begins as ever. `COLD=1` in the environment of a process or of the tests turns it off; `make
test-all` does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
HAS_GPU = Path("/dev/nvidiactl").exists()
READ_AT_IMPORT = (
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "ONEDNN_", "TORCH", "NUMBA_", "HF_", "TRANSFORMERS_", "CUDA", "TRITON_"),
    *("PYTHON", "LD_", "MALLOC_", "XDG_", "HOME", "PATH", "LANG", "LC_", "RAY_", "PLAIT_", "COLD"),
)
"""Beginnings of the names of variables that a process may read but once."""
CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, 0)
RANK = "from plait.launch.worker import main"
AGENT = "from plait.launch.nodes.joining import serve"
REWARD = "from plait.rewards.worker import main"
"""In the program of a process that is given in words."""


@dataclass(frozen=True)
class Kind:
    """Processes that begin alike.

    imported:  modules that all of them import
    variables: of the template beside the tests' own, as the processes get them
    """

    imported: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


COMPUTES = Kind(
    (
        "plait.runtime.processes.worker",
        "plait.cli",
        "plait.algorithms.grpo",
        "plait.algorithms.ppo",
        "plait.launch.store",
        "transformers.models.llama.modeling_llama",
        "transformers.models.auto.modeling_auto",
    ),
    (("PYTHONHASHSEED", "0"), *((f"{what}_NUM_THREADS", "1") for what in ("OMP", "MKL", "OPENBLAS"))),
)
SCORES = Kind(
    ("plait.rewards.worker",),
    (("PYTHONHASHSEED", "0"), ("OMP_NUM_THREADS", "1"), ("PLAIT_REWARD_WORKER", "1")),
)
GARBAGE = (20_000, 20, 20)
"""When garbage is looked for in processes of tests (`gc.set_threshold`): as often as Python does by itself, that is a
twentieth of what tests compute."""
FIRST_FREE = 500
"""Number of a file that no process is given as its own."""


def install(*, tests: bool = True) -> None:
    """Have `subprocess.Popen` start processes warm, from the first that can be on.

    Args:
        tests: whether this is the process of the tests, which alone starts many that score.
    """
    _TESTS[:] = [os.getpid()] if tests else []
    if sys.platform == "linux" and SYS_CLONE and not os.environ.get("COLD"):
        setattr(subprocess, "Popen", WarmPopen)  # noqa: B010


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` whose processes are forks of the template, where they can be."""

    def _execute_child(self, *arguments: Any) -> None:
        names = (
            *("args", "executable", "preexec_fn", "close_fds", "pass_fds", "cwd", "env", "startupinfo"),
            *("creationflags", "shell", "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"),
            *("restore_signals", "gid", "gids", "uid", "umask", "start_new_session", "process_group"),
        )
        asked = dict(zip(names, arguments, strict=False))
        known = len(arguments) == len(names)  # those of Python 3.11 to 3.14
        kind = _kind_of(asked) if known else None
        template = _template(kind) if kind is not None else None
        if template is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", asked["args"][0], asked["args"], asked["cwd"], asked["env"])
        ends = [asked[name] if asked[name] != -1 else fd for fd, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        self.pid = template.fork(
            {
                "argv": [os.fspath(word) for word in asked["args"]],
                "environment": dict(asked["env"] if asked["env"] is not None else os.environ),
                "cwd": os.fspath(asked["cwd"] or os.getcwd()),
                "session": asked["start_new_session"],
                "fds": [0, 1, 2, *asked["pass_fds"]],
            },
            [*ends, *asked["pass_fds"]],
        )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]


def _kind_of(asked: Mapping[str, Any]) -> Kind | None:
    """None: it begins cold."""
    words = asked["args"]
    if isinstance(words, str | bytes | os.PathLike) or asked["shell"] or asked["preexec_fn"] is not None:
        return None
    if asked["executable"] not in (None, words[0]) or (asked["gid"], asked["gids"], asked["uid"]) != (None,) * 3:
        return None
    if asked["cwd"] is not None and not os.path.isdir(asked["cwd"]):
        return None
    words = [os.fspath(word) for word in words]
    kind = _kind_of_command(words) if words[0] == sys.executable else None
    if kind is None or (kind is SCORES and os.getpid() not in _TESTS):
        return None
    environment = os.environ if asked["env"] is None else asked["env"]
    given = dict(kind.variables)
    mine = os.environ | given
    read = {name for name in {*environment, *mine} if name.startswith(READ_AT_IMPORT)}
    same = all(environment.get(name, mine.get(name) if name in given else None) == mine.get(name) for name in read)
    return kind if same else None


def _kind_of_command(words: Sequence[str]) -> Kind | None:
    """A rank of a group, the agent of a node, the command line and a benchmark compute; a process of rewards scores."""
    what = words[1:3]
    if what[0] == "-c" and REWARD in what[1]:
        return SCORES
    if what[0] == "-c":
        return COMPUTES if any(start in what[1] for start in (RANK, AGENT)) else None
    return COMPUTES if what == ["-m", "plait"] or Path(what[0]).parent == ROOT / "benchmarks" else None


class Template:
    """The end at which a template, a process that has imported, is told to fork."""

    def __init__(self, asked: socket.socket) -> None:
        self.owner = os.getpid()
        self._socket = asked

    @classmethod
    def begun(cls, kind: Kind) -> Template:
        """A new one."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", "import sys; from tests.warm import serve; serve(int(sys.argv[1]))"]
        fd = theirs.fileno()
        environment = os.environ | dict(kind.variables)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        COLD_POPEN(
            [*command, str(fd), *kind.imported],
            env=environment | {"PYTHONPATH": path},
            pass_fds=[fd],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        return cls(ours)

    @classmethod
    def forked(cls, path: Sequence[str]) -> Template:
        """That of a process which is a fork of a template itself, and will start others: again a fork, of it."""
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            os.setsid()
            os.chdir("/")
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(nothing, fd)
            kept = theirs.fileno()
            os.closerange(3, kept)
            os.closerange(kept + 1, FIRST_FREE)
            _fork_for(theirs, path)
            raise _Begun
        theirs.close()
        return cls(ours)

    def fork(self, order: Mapping[str, Any], fds: Sequence[int]) -> int:
        """The number of a new process."""
        body = json.dumps(order).encode()
        socket.send_fds(self._socket, [len(body).to_bytes(4, "big")], list(fds))
        self._socket.sendall(body)
        answer = self._socket.recv(4, socket.MSG_WAITALL)
        if len(answer) < 4:
            raise RuntimeError("the template of warm processes has ended")
        return int.from_bytes(answer, "big")


COLD_POPEN = subprocess.Popen
_TEMPLATES: dict[Kind, Template] = {}
_TESTS: list[int] = []
"""The number of the process of the tests."""


def _template(kind: Kind) -> Template:
    """That of this process: a fork of it, as tests make, has none."""
    if kind not in _TEMPLATES or _TEMPLATES[kind].owner != os.getpid():
        _TEMPLATES[kind] = Template.begun(kind)
    return _TEMPLATES[kind]


def serve(fd: int) -> None:
    """The template: import and rehearse, then fork until nobody is left who asks. Returns in the forks, when they have
    ended."""
    import gc
    import importlib

    path = [entry for entry in sys.path if entry not in ("", str(ROOT))]
    for name in sys.argv[2:]:
        importlib.import_module(name)
    importlib.import_module("tests.disk").install()
    if "torch" in sys.modules and not HAS_GPU:  # torch computes gradients on threads where it sees a GPU
        importlib.import_module("tests.rehearsal").rehearse()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, "a template with threads cannot be forked"
    with contextlib.suppress(_Begun):
        _fork_for(socket.socket(fileno=fd), path)


class _Begun(BaseException):
    """A program has run in this process, which a template was once, and has returned."""


def _fork_for(asked: socket.socket, path: Sequence[str]) -> None:
    """Returns in the forks, when what they were to run has returned; the template ends when nobody asks any more."""
    while True:
        try:
            head, fds, _, _ = socket.recv_fds(asked, 4, 64)
        except KeyboardInterrupt:
            continue
        if not head:
            os._exit(0)
        body = b""
        while len(body) < (size := int.from_bytes(head, "big")):
            body += asked.recv(size - len(body))
        begun, begins = os.pipe()
        if (pid := _clone()) == 0:
            asked.close()
            os.close(begun)
            order = json.loads(body)
            if order["session"]:
                os.setsid()
            os.close(begins)
            _become(order, fds, path)
            return
        for fd in (*fds, begins):
            os.close(fd)
        os.read(begun, 1)  # who asked may kill its session at once
        os.close(begun)
        asked.sendall(pid.to_bytes(4, "big"))


def _clone() -> int:
    """As `os.fork`, of a child of this process's parent."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    assert pid >= 0, "no process can be made"
    return pid


def _become(order: Mapping[str, Any], fds: Sequence[int], path: Sequence[str]) -> None:
    """What `exec` would have made of this process, as far as a program sees it; then the program."""
    import fcntl
    import random

    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, order["fds"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["cwd"])
    random.seed()
    if not any(start in word for word in order["argv"][1:3] for start in (RANK, REWARD)):  # all others may start ranks
        _TEMPLATES.clear()
        _TEMPLATES[COMPUTES] = Template.forked(path)
        install(tests=False)
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]
    try:
        _run(order, path)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        _end(ended.code or 0)
    _end(0)


def _run(order: Mapping[str, Any], path: Sequence[str]) -> None:
    how, what = order["argv"][1:3]
    if how == "-c":
        sys.argv, sys.path[:] = ["-c", *order["argv"][3:]], ["", *path]
        main = sys.modules["__main__"].__dict__
        for name in ("sys", "serve"):
            main.pop(name)
        exec(compile(what, "<string>", "exec"), main)
    elif how == "-m":
        sys.argv, sys.path[:] = [what, *order["argv"][3:]], [order["cwd"], *path]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:] = order["argv"][1:], [str(Path(how).parent), *path]
        runpy.run_path(how, run_name="__main__")


def _end(code: int) -> NoReturn:
    """As Python ends, but for taking down all that the template has imported: that is half a second of computing."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        sys.exit(code)  # what Python makes of that
    os._exit(code & 0xFF)

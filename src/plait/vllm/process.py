"""vLLM's process: how it is started, and what became of it in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from plait.launch.failures import Failure
from plait.launch.group import Group
from plait.launch.local import LocalNode, LocalProcesses
from plait.launch.watch import Watch
from plait.vllm.environment import checked_environment
from plait.vllm.messages import Loading
from plait.vllm.server import ENVIRONMENT, VllmServer

START_S = 900.0
"""For vLLM to be imported, and to make room for the model and its keys and values."""

Start = Callable[[Loading, Path], Group]
"""Starts a process that serves as `server.VllmServer` does, given a folder for its temporary files. Raises
WorkerError."""


def start_vllm(device: str, threads: int, freeze_after_s: float) -> Start:
    """Starts vLLM in its environment.

    Raises:
        ConfigError: there is none for the device, or one of an untested version.
    """
    python = checked_environment(device).python

    def start(loading: Loading, folder: Path) -> Group:
        launcher = LocalProcesses(
            threads=threads,
            environment={**ENVIRONMENT, "TMPDIR": str(folder)},
            nodes=[LocalNode(python=python)],
            watch=Watch(freeze_after_s),
        )
        return launcher.start(VllmServer, 1, arguments=(loading,), deadline_s=START_S)

    return start


def last_words(failure: Failure) -> str:
    """Where the process was, and the end of what it printed."""
    parts = ("stack", failure.traceback), ("last output of vLLM", failure.output)
    return "\n".join(
        f"{title}:\n" + "\n".join(f"  | {line}" for line in text.rstrip().splitlines()) for title, text in parts if text
    )

"""No test of `make quick` can start a process: neither cold nor warm, and whatever runs it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import quick

COLD = [sys.executable, "-c", "pass"]
WARM = [sys.executable, "-m", "plait", "--help"]


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(COLD, check=True),
        lambda: subprocess.run(WARM, check=True),
        lambda: os.system("true"),
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
        lambda: os._exit(0) if os.fork() == 0 else None,
        lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    ],
    ids=["cold", "warm", "shell", "spawned", "forked", "multiprocessing"],
)
def test_a_quick_test_starts_no_process(start: Callable[[], object]) -> None:
    with pytest.raises(AssertionError, match=r"^tests/test_quick.py::test_a.*starts a process .*: mark it `process`"):
        start()


@pytest.mark.process
@pytest.mark.parametrize("command", [COLD, WARM], ids=["cold", "warm"])
def test_a_marked_one_starts_what_it_likes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """Once processes of the kind begin warm, others are refused as they were before."""
    assert not quick.is_quick(request.node)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    monkeypatch.setattr(quick, "is_quick", lambda item: True)
    with quick.refused_processes(request.node), pytest.raises(AssertionError, match=r"starts a process \(subprocess"):
        subprocess.run(command, check=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def test_the_list_names_what_there_is() -> None:
    within, without = quick.listed()
    assert all(path.exists() for path in (*within, *without))
    assert all(path.is_dir() or path.name.startswith("test_") for path in (*within, *without))
    assert all(set(path.parents) & within for path in without)


@pytest.mark.parametrize(
    ("path", "is_quick"),
    [
        ("policy/test_batching.py", True),
        ("test_quick.py", True),
        ("algorithms/test_grpo.py", True),
        ("algorithms/test_toys.py", False),
        ("runs/test_run.py", False),
        ("test_compiled.py", False),
    ],
)
def test_which_files_are_quick(path: str, is_quick: bool) -> None:
    assert quick.is_quick_file(Path(__file__).parent / path) is is_quick

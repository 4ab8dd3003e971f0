"""Which tests `make quick` runs, and that none of them starts a process, whatever runs them.

`tests/quick.txt` has the arguments that pytest gets there, one a line: plain Python, numbers and files, and no real
model. Tests that are slow, or start a process, stand among them with a mark that says so, and are left out. A process
that a fixture of a module starts is one of the test that asks first for it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, wraps
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
STARTS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"))
_running: list[str] = []
"""The quick test that runs, if one does."""


@cache
def listed() -> tuple[frozenset[Path], frozenset[Path]]:
    """Files and folders that hold quick tests, and those in them that hold none."""
    within, without = set(), set()
    for line in (TESTS / "quick.txt").read_text().splitlines():
        path = TESTS.parent / line.removeprefix("--ignore=")
        (without if line.startswith("--ignore=") else within).add(path)
    return frozenset(within), frozenset(without)


@cache
def is_quick_file(path: Path) -> bool:
    within, without = listed()
    places = {path, *path.parents}
    return bool(places & within) and not places & without


def is_quick(item: pytest.Item) -> bool:
    return is_quick_file(item.path) and not any(item.get_closest_marker(name) for name in ("slow", "process"))


@contextmanager
def refused_processes(item: pytest.Item) -> Generator[None, None, None]:
    """While a test runs: of a quick one no process can be started."""
    if not is_quick(item):
        yield
        return
    _running.append(item.nodeid)
    try:
        yield
    finally:
        _running.pop()


def _refuse_processes(event: str, _: tuple[Any, ...]) -> None:
    if event in STARTS:
        _refuse(event)


def _refuse(event: str) -> None:
    if _running:
        raise AssertionError(f"{_running[-1]} starts a process ({event}): mark it `process`, `make quick` has none")


def install() -> None:
    """For the life of this process: a hook of this kind stays. What `multiprocessing` spawns tells no hook."""
    sys.addaudithook(_refuse_processes)
    spawn = util.spawnv_passfds

    @wraps(spawn)
    def spawn_or_refuse(path: Any, args: Any, passfds: Any) -> Any:
        _refuse("multiprocessing")
        return spawn(path, args, passfds)

    util.spawnv_passfds = spawn_or_refuse

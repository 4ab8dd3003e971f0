"""Random examples have no time limit: how long one takes says how busy the machine is. One thread, for tiny tensors.
Without a GPU triton's kernels are interpreted."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

# Before torch is imported: two threads on a busy machine are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before triton is imported: it looks at this where a kernel is defined, its own among them.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from tests import warm

IS_QUICK = os.environ.get("QUICK") == "1"
"""Whether these are the tests of `make quick`, none of which may start a process."""
STARTS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"))
running: list[str] = []
"""The test that runs."""


def refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS and running:
        raise AssertionError(f"{running[-1]} starts a process ({event}): mark it `process`, `make quick` has none")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    running.append(item.nodeid)
    try:
        return (yield)
    finally:
        running.pop()


if IS_QUICK:
    sys.addaudithook(refuse_processes)
else:
    warm.install()

# `make test` tries the same examples each time; `make test-all` tries new ones, twice as many.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

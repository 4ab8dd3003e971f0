"""Groups of workers: processes that are started once for all tests of a size."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from plait.launch.interface import Group
from plait.launch.local import LocalProcesses
from tests.reallocation.worker import Worker


@pytest.fixture(scope="session")
def two() -> Iterator[Group]:
    with LocalProcesses(threads=1).start(Worker, 2) as group:
        yield group


@pytest.fixture(scope="session")
def four() -> Iterator[Group]:
    with LocalProcesses(threads=1).start(Worker, 4) as group:
        yield group

"""Groups of workers: processes that are started once for all tests of a size."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from plait.launch.group import Group
from tests.launch.groups import group_of
from tests.reallocation.worker import Worker


@pytest.fixture(scope="session")
def two() -> Iterator[Group]:
    yield from group_of(Worker, 2)


@pytest.fixture(scope="session")
def four() -> Iterator[Group]:
    yield from group_of(Worker, 4)

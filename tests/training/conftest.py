"""Workers that are started once for all tests on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait.launch.interface import Group
from plait.launch.local import LocalProcesses
from tests.training.worker import Worker


@pytest.fixture(scope="session")
def four() -> Iterator[Group]:
    with LocalProcesses(threads=1).start(Worker, 4) as group:
        yield group

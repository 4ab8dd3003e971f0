"""Workers that are started once for all tests on several ranks; sums in float64 that are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait.launch.interface import Group
from plait.launch.local import LocalProcesses
from tests.training.exact import ExactFloat64
from tests.training.worker import Worker


@pytest.fixture(scope="session")
def four() -> Iterator[Group]:
    with LocalProcesses(threads=1).start(Worker, 4) as group:
        yield group


@pytest.fixture
def exact_float64() -> Iterator[None]:
    with ExactFloat64():
        yield

"""Workers that are started once for all tests on several ranks; sums in float64 that are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plait.launch.group import Group
from tests.launch.groups import group_of
from tests.training.exact import ExactFloat64
from tests.training.worker import Worker


@pytest.fixture(scope="session")
def four() -> Iterator[Group]:
    yield from group_of(Worker, 4)


@pytest.fixture
def exact_float64() -> Iterator[None]:
    with ExactFloat64():
        yield

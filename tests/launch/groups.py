"""Groups of workers for fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plait.launch.group import Group
from plait.launch.local import LocalProcesses


def group_of(worker: type[Any], num_ranks: int) -> Iterator[Group]:
    """Processes of one thread each, as long as the fixture is there."""
    with LocalProcesses(threads=1).start(worker, num_ranks) as group:
        yield group

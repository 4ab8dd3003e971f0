"""Python looks for garbage seldom while plans are searched, and as before when that has ended."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from plait.planner.collecting import OBJECTS, collecting_seldom


@pytest.fixture
def restored() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [((700, 10, 9), (OBJECTS, 10, 9)), ((0, 10, 10), (0, 10, 10)), ((OBJECTS + 1, 5, 5), (OBJECTS + 1, 5, 5))],
    ids=["as usual", "never", "more seldom"],
)
def test_no_oftener_than_before(before: tuple[int, int, int], meanwhile: tuple[int, int, int]) -> None:
    gc.set_threshold(*before)
    seen: list[tuple[int, int, int]] = []

    @collecting_seldom()
    def interrupted() -> None:
        seen.append(gc.get_threshold())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == [meanwhile]
    assert gc.get_threshold() == before

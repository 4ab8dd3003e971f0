"""How many computed prompts go on to an instance that draws; by hand."""

from __future__ import annotations

import pytest

from plait.policy.prompt_pace import PromptRoom, Taken, num_that_go

GROUPS = [Taken(4, 100), Taken(4, 30), Taken(4, 10)]


@pytest.mark.parametrize(
    ("taken", "room", "count"),
    [
        (Taken(), PromptRoom(100), 3),
        (Taken(5, 50), PromptRoom(8), 1),  # 9 then, and no place is free
        (Taken(8, 50), PromptRoom(8), 1),  # it waits behind a full batch
        (Taken(9, 50), PromptRoom(8), 0),  # one waits already
        (Taken(), PromptRoom(1), 1),  # the next one would not be the only one that waits
        (Taken(4, 50), PromptRoom(100, kv_tokens=50 + 100 + 8 * 16), 1),  # a block of 16 behind each sample
        (Taken(4, 50), PromptRoom(100, kv_tokens=50 + 100 + 8 * 16 - 1), 0),
        (Taken(4, 50), PromptRoom(100, kv_tokens=50 + 130 + 12 * 16), 2),
        (Taken(), PromptRoom(100, kv_tokens=10), 1),  # it was checked to fit alone
        (Taken(), PromptRoom(100, most=99), 1),  # one at least
        (Taken(), PromptRoom(100, most=130), 2),
    ],
)
def test_as_many_as_have_room(taken: Taken, room: PromptRoom, count: int) -> None:
    assert num_that_go(GROUPS, taken, room) == count


def test_of_none_none() -> None:
    assert num_that_go([], Taken(), PromptRoom(1)) == 0

"""Which work a rank goes on with: by hand, and that ranks that keep to it never wait for each other for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from plait.policy.turns import Turn, next_turn


def test_whoever_has_waited_the_longest_goes_on() -> None:
    assert next_turn([Turn(7), Turn(3)]) == 3, "neither has gone on: the first"
    assert next_turn([Turn(3, last=1), Turn(7)]) == 7
    assert next_turn([Turn(3, last=1), Turn(7, last=2)]) == 3


def test_of_works_with_others_the_first_goes_on_beside_those_of_the_rank_alone() -> None:
    works = [Turn(1, is_joint=True, last=5), Turn(2, is_joint=True), Turn(3, last=4)]
    assert next_turn(works) == 3
    assert next_turn([*works[:2], Turn(3, last=6)]) == 1
    assert next_turn([works[1], Turn(3, last=6)]) == 2


def test_what_must_be_alone_waits_for_all_before_it_and_holds_up_all_behind() -> None:
    change = Turn(2, is_alone=True)
    assert next_turn([Turn(1, last=9), change, Turn(3)]) == 1
    assert next_turn([change, Turn(3)]) == 2
    assert next_turn([replace(change, last=9), Turn(3)]) == 2


def test_what_is_behind_waits_for_all_before_it_and_holds_up_nothing() -> None:
    score = Turn(2, is_behind=True)
    assert next_turn([Turn(1, last=9), score]) == 1
    assert next_turn([Turn(1, last=9), score, Turn(3, last=4)]) == 3
    assert next_turn([score, Turn(3, last=4)]) == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_waits_for_ever(seed: int) -> None:
    """Up to 5 ranks, up to 12 works of up to 4 actions on any of them, alone on some. Each rank is sent its works in
    their order, at any moment; in an action of a joint work it waits for the others. All come to their ends."""
    draw = random.Random(seed)
    for _ in range(20):
        num_ranks = draw.randint(2, 5)
        works = []
        for number in range(draw.randint(1, 12)):
            ranks = draw.sample(range(num_ranks), draw.randint(1, num_ranks))
            is_joint = len(ranks) > 1
            is_behind = not is_joint and draw.random() < 0.3
            works.append((Turn(number, is_joint, is_behind=is_behind), ranks, draw.randint(1, 4)))
        left = {work.number: count for work, _, count in works}
        members = {work.number: set(ranks) for work, ranks, _ in works}
        coming = {rank: [work for work, ranks, _ in works if rank in ranks] for rank in range(num_ranks)}
        there: dict[int, dict[int, Turn]] = {rank: {} for rank in range(num_ranks)}
        inside: dict[int, int] = {}
        """Rank that waits for others → in which work."""
        for turn in range(1, 10_000):
            if not any(left.values()):
                break
            rank = draw.randrange(num_ranks)
            if coming[rank] and draw.random() < 0.5:
                work = replace(coming[rank].pop(0), is_alone=draw.random() < 0.3)
                there[rank][work.number] = work
            if rank in inside or not there[rank]:
                continue
            number = next_turn(list(there[rank].values()))
            there[rank][number] = replace(there[rank][number], last=turn)
            inside[rank] = number
            if all(inside.get(member) == number for member in members[number]):
                left[number] -= 1
                for member in members[number]:
                    del inside[member]
                    if not left[number]:
                        del there[member][number]
        assert not any(left.values()), f"ranks wait for each other: {inside}"

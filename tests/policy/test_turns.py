"""Which work a rank goes on with: by hand, and that ranks that keep to it never wait for each other for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from plait.policy.turns import Work, next_work


def test_whoever_has_waited_the_longest_goes_on() -> None:
    assert next_work([Work(7), Work(3)]) == 3, "neither has gone on: the first"
    assert next_work([Work(3, turn=1), Work(7)]) == 7
    assert next_work([Work(3, turn=1), Work(7, turn=2)]) == 3


def test_of_works_with_others_the_first_goes_on_beside_those_of_the_rank_alone() -> None:
    works = [Work(1, is_joint=True, turn=5), Work(2, is_joint=True), Work(3, turn=4)]
    assert next_work(works) == 3
    assert next_work([*works[:2], Work(3, turn=6)]) == 1
    assert next_work([works[1], Work(3, turn=6)]) == 2


def test_what_must_be_alone_waits_for_all_before_it_and_holds_up_all_behind() -> None:
    change = Work(2, is_alone=True)
    assert next_work([Work(1, turn=9), change, Work(3)]) == 1
    assert next_work([change, Work(3)]) == 2
    assert next_work([replace(change, turn=9), Work(3)]) == 2


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
            works.append((Work(number, len(ranks) > 1), ranks, draw.randint(1, 4)))
        left = {work.number: count for work, _, count in works}
        members = {work.number: set(ranks) for work, ranks, _ in works}
        coming = {rank: [work for work, ranks, _ in works if rank in ranks] for rank in range(num_ranks)}
        there: dict[int, dict[int, Work]] = {rank: {} for rank in range(num_ranks)}
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
            number = next_work(list(there[rank].values()))
            there[rank][number] = replace(there[rank][number], turn=turn)
            inside[rank] = number
            if all(inside.get(member) == number for member in members[number]):
                left[number] -= 1
                for member in members[number]:
                    del inside[member]
                    if not left[number]:
                        del there[member][number]
        assert not any(left.values()), f"ranks wait for each other: {inside}"

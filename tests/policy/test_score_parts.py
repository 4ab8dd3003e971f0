"""What is scored together: groups in the order in which they would end, which is known before all have ended."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from plait.policy.score_parts import PartSize, SampleLength, ScoredPart, next_part, settled

Groups = list[list[SampleLength]]


def ended(*groups: tuple[int, ...]) -> Groups:
    return [[SampleLength(tokens, ended=True) for tokens in group] for group in groups]


def places(groups: Groups, at_once: int) -> list[int]:
    """Of groups that are whole."""
    pieces = settled(groups, at_once)
    assert all(len(piece.indices) == len(groups[piece.place]) for piece in pieces)
    return [piece.place for piece in pieces]


def test_all_at_once_end_by_their_longest() -> None:
    assert places(ended((3, 9), (4, 4), (9, 1), (2, 3)), at_once=8) == [3, 1, 0, 2]


def test_what_waits_for_a_place_begins_later() -> None:
    """Two at a time: samples of 5 and 2; of 2, from step 2 to 4; of 4, from step 4 to 8; of 1, from step 5 to 6."""
    assert places(ended((5,), (2,), (2,), (4,), (1,)), at_once=2) == [1, 2, 0, 4, 3]


def test_one_at_a_time_is_the_order_of_prompts() -> None:
    assert places(ended((9, 1), (1, 1), (5, 2)), at_once=1) == [0, 1, 2]


def test_a_group_that_has_said_more_comes_later() -> None:
    groups = [*ended((3, 4)), [SampleLength(9, ended=True), SampleLength(2, ended=False)]]
    assert places(groups, at_once=4) == [0]
    groups[1][0] = SampleLength(3, ended=True)
    assert places(groups, at_once=4) == [], "it may end with its third token"
    groups[1][1] = SampleLength(4, ended=False)
    assert places(groups, at_once=4) == [0]


def test_who_waits_behind_an_unfinished_sample_is_known_to_begin_by_another() -> None:
    """Two at a time: the third begins at step 2, when the second has ended; the fourth may begin at 4 or sooner."""
    groups = [[SampleLength(2, ended=False)], *ended((2,), (2,), (1,))]
    assert places(groups, at_once=2) == [1]
    groups[0] = [SampleLength(4, ended=False)]
    assert places(groups, at_once=2) == [1, 2]
    groups[0] = [SampleLength(5, ended=False)]
    assert places(groups, at_once=2) == [1, 2, 3]


def test_who_may_take_a_place_leaves_it_vague() -> None:
    """Three at a time: while the first sample may end at any time, the fourth may have its place or another."""
    groups = ended((12, 12), (2, 5), (1, 1))
    assert places(groups, at_once=3) == [1, 2, 0]
    groups[0][0] = SampleLength(0, ended=False)
    assert places(groups, at_once=3) == []


def test_the_last_samples_are_split_from_the_others_of_their_groups() -> None:
    """The last three of eight are those of 9, 8 and 5 tokens: the groups that have them give what ended before, in the
    order of prompts, behind those that have none."""
    groups = ended((9, 1), (3, 4), (2, 8), (5, 1))
    assert settled(groups, 8, num_split=3) == [
        (1, (0, 1)),
        (0, (1,)),
        (2, (0,)),
        (3, (1,)),
        (3, (0,)),
        (2, (1,)),
        (0, (0,)),
    ]
    assert settled(groups, 8, num_split=2) == [(1, (0, 1)), (3, (0, 1)), (0, (1,)), (2, (0,)), (2, (1,)), (0, (0,))]
    assert settled(ended((9, 8), (3, 4)), 4, num_split=2) == [(1, (0, 1)), (0, (0, 1))], (
        "a group of the last alone is whole"
    )
    assert settled(groups, 8, num_split=8) == settled(groups, 8), "nothing ends before"


def test_what_is_split_is_known_when_the_last_samples_are() -> None:
    groups = ended((9, 1), (3, 4))
    groups[0][0] = SampleLength(3, ended=False)
    assert settled(groups, 4, num_split=1) == [], "prompt 1 may have the last"
    groups[0][0] = SampleLength(4, ended=False)
    assert settled(groups, 4, num_split=1) == [ScoredPart(1, (0, 1)), ScoredPart(0, (1,))]
    assert settled(groups, 4) == [ScoredPart(1, (0, 1))]


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[list[list[int]], int, random.Random]:
    count = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.lists(st.integers(1, 12), min_size=count, max_size=count), min_size=1, max_size=8))
    return lengths, draw(st.integers(1, 40)), draw(st.randoms(use_true_random=False))


@given(rollouts())
def test_what_is_known_early_is_so_at_the_end(rollout: tuple[list[list[int]], int, random.Random]) -> None:
    """Whatever samples have said, in whatever order they end: the order of all is that of the lengths alone."""
    lengths, at_once, rng = rollout
    final = places([[SampleLength(n, ended=True) for n in group] for group in lengths], at_once)
    assert sorted(final) == list(range(len(lengths)))
    groups = [
        [
            SampleLength(n, ended=True) if rng.random() < 0.6 else SampleLength(rng.randrange(n), ended=False)
            for n in one
        ]
        for one in lengths
    ]
    known = places(groups, at_once)
    assert known == final[: len(known)]
    assert all(sample.ended for place in known for sample in groups[place])


@given(rollouts(), st.integers(1, 40))
def test_what_is_split_early_is_so_at_the_end(
    rollout: tuple[list[list[int]], int, random.Random], num_split: int
) -> None:
    lengths, at_once, rng = rollout
    final = settled([[SampleLength(n, ended=True) for n in group] for group in lengths], at_once, num_split)
    every = sorted((place, index) for place, group in enumerate(lengths) for index in range(len(group)))
    assert sorted((place, index) for place, indices in final for index in indices) == every
    share = rng.random()
    groups = [
        [
            SampleLength(n, ended=True) if rng.random() < share else SampleLength(rng.randrange(n), ended=False)
            for n in one
        ]
        for one in lengths
    ]
    known = settled(groups, at_once, num_split)
    assert known == final[: len(known)]
    assert all(groups[place][index].ended for place, indices in known for index in indices)


def test_parts_are_full_or_small_at_the_end() -> None:
    """Of 10 groups of 30 tokens, three fit into 100. Two copies: no part has more than a quarter of what is left."""
    sizes = [30] * 10
    assert parts_of(sizes, PartSize(100)) == [3, 3, 3, 1]
    assert parts_of(sizes, PartSize(100, falls=2)) == [3, 2, 2, 1, 1, 1]
    assert parts_of(sizes, PartSize(100, rises=True)) == [1, 1, 3, 3, 2]
    assert parts_of([150, 20, 90, 10], PartSize(100)) == [1, 1, 1, 1], "a group of 90 is not waited behind"
    assert parts_of([150, 20, 80], PartSize(100)) == [1, 2]


def parts_of(sizes: list[int], size: PartSize) -> list[int]:
    parts: list[int] = []
    while (done := sum(parts)) < len(sizes):
        count = next_part(sizes[done:], len(sizes) - done, size, len(parts))
        assert count is not None
        parts.append(count)
    return parts


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
    st.integers(1, 100),
    st.booleans(),
    st.none() | st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_parts_do_not_depend_on_when_groups_are_settled(
    sizes: list[int], tokens: int, rises: bool, falls: int | None, rng: random.Random
) -> None:
    size = PartSize(tokens, rises, falls)
    final = parts_of(sizes, size)
    parts: list[int] = []
    known = 0
    while (done := sum(parts)) < len(sizes):
        count = next_part(sizes[done:known], len(sizes) - done, size, len(parts))
        if count is None:
            known = min(len(sizes), known + rng.randint(1, 3))
        else:
            parts.append(count)
    assert parts == final
    at = 0
    for count in parts:
        assert count == 1 or sum(sizes[at : at + count]) <= tokens
        at += count

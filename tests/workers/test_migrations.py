"""Samples that are gathered at any token, by any instances, in any manner: they say what one process says that moves
none. float64."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plait.launch.group import Group
from tests.cases import examples
from tests.workers.sample_moves import DrawnMove, DrawnRollout, alone

LIMIT_S = 120.0
ON_TWO = [({"ranks": (0,)}, {"ranks": (1,)}), ({"ranks": (1,)}, {"ranks": (0,)})]
ON_FOUR = [
    ({"ranks": (0,)}, {"ranks": (1,)}, {"ranks": (2,)}, {"ranks": (3,)}),
    ({"ranks": (1, 0), "tp": 2}, {"ranks": (2,)}, {"ranks": (3,)}),
    ({"ranks": (2, 0), "pp": 2, "stages": (1, 1)}, {"ranks": (1, 3), "tp": 2}),
    ({"ranks": (3,)}, {"ranks": (0, 2), "pp": 2, "stages": (1, 1)}, {"ranks": (1,)}),
]
"""Instances of each case."""


@st.composite
def rollouts(draw: st.DrawFn, cases: list[tuple[Any, ...]]) -> tuple[tuple[Any, ...], DrawnRollout]:
    """Instances, and what they generate. The smallest pool has room for the longest sample, alone."""
    places = draw(st.sampled_from(cases))
    numbers = st.integers(0, len(places) - 1)
    lengths = st.lists(st.integers(2, 20), min_size=1, max_size=3).map(tuple)
    asked = draw(st.lists(st.tuples(st.integers(1, 40), lengths, numbers), min_size=2, max_size=4).map(tuple))
    every = frozenset((uid, index) for uid, (_, lengths, _) in enumerate(asked) for index in range(len(lengths)))
    some = st.one_of(st.just(every), st.frozensets(st.sampled_from(sorted(every))))
    few = st.one_of(st.just(frozenset()), some)
    moves = st.builds(
        DrawnMove,
        kept=st.lists(numbers, min_size=1, max_size=len(places) - 1, unique=True).map(tuple),
        keys=some,
        recompute=few,
        ahead=st.booleans(),
        stays=few,
        steps=st.tuples(*[st.tuples(*[st.integers(0, 5)] * len(places))] * 4),
    )
    rollout = DrawnRollout(
        asked, draw(st.lists(moves, min_size=1, max_size=4).map(tuple)), draw(st.sampled_from([None, 64, 96]))
    )
    return places, rollout


def check(group: Group, places: tuple[Any, ...], rollout: DrawnRollout) -> int:
    """Returns how many samples have moved."""
    asked = group.submit(range(group.num_ranks), "run", "tests.workers.sample_moves", "drawn", places, rollout)
    of_ranks = asked.result(LIMIT_S)
    assert [one.wrong for one in of_ranks] == [[]] * group.num_ranks
    seen = []
    for place in places:
        first, *others = (of_ranks[rank] for rank in place["ranks"])
        for other in others:
            assert (other.said, other.owned, other.left) == (first.said, first.owned, first.left)
        seen.append(first)
    for owned in zip(*(one.owned for one in seen), strict=True):
        assert sum(map(len, owned)) == len(frozenset().union(*owned)), "a sample has two owners"
    expected = alone("llama", "float64", asked=rollout.requests)
    assert sorted(key for one in seen for key in one.said) == sorted(expected)
    for key, (token_ids, logprobs) in (item for one in seen for item in one.said.items()):
        assert token_ids == expected[key][0]
        assert logprobs == pytest.approx(expected[key][1], abs=1e-9)
    return sum(len(one.left) for one in seen)


def played(group: Group, cases: list[tuple[Any, ...]], count: int) -> int:
    """As many random rollouts; returns how many of their samples have moved."""
    moved = []

    @settings(max_examples=count, deadline=None, phases=[Phase.generate])
    @given(rollouts(cases))
    def all_of_them(drawn: tuple[tuple[Any, ...], DrawnRollout]) -> None:
        moved.append(check(group, *drawn))

    all_of_them()
    return sum(moved)


@pytest.mark.slow
def test_samples_that_move_between_two_processes_say_the_same(two: Group) -> None:
    assert played(two, ON_TWO, examples(5, 40)) > 0


def test_samples_that_move_between_four_processes_say_the_same(four: Group) -> None:
    """Between instances of one rank and of two, which divide heads or layers."""
    assert played(four, ON_FOUR, examples(5, 40)) > 0

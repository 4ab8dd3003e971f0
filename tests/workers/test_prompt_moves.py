"""Prompts that leave the instances that computed them, on real processes: their samples say what they say where they
are computed themselves."""

from __future__ import annotations

from typing import Any

import pytest

from plait.launch.group import Group
from tests.cases import slow_but
from tests.workers.prompts_apart import ASKED
from tests.workers.sample_moves import OTHER, alone

LIMIT_S = 120.0
ON_FOUR = {
    "tp2 to pp2": ([{"ranks": (2, 1), "pp": 2, "stages": (1, 1)}], [{"ranks": (0, 3), "tp": 2}]),
    "two to tp2": ([{"ranks": (1, 0), "tp": 2}], [{"ranks": (2,)}, {"ranks": (3,)}]),
    "pp2 to two": ([{"ranks": (1,)}, {"ranks": (3,)}], [{"ranks": (0, 2), "pp": 2, "stages": (1, 1)}]),
}


def check(group: Group, draws: list[dict[str, Any]], computes: list[dict[str, Any]], *, ahead: bool) -> None:
    handle = group.submit(range(group.num_ranks), "run", "tests.workers.prompts_apart", "apart", draws, computes, ahead)
    of_ranks = handle.result(LIMIT_S)
    assert [one.seen.wrong for one in of_ranks] == [[]] * group.num_ranks
    expected = alone("llama", "float64", asked=(*ASKED, OTHER))
    found: dict[Any, Any] = {}
    for place in draws:
        members = [of_ranks[rank] for rank in place["ranks"]]
        for one in members:
            assert one.said == members[0].said
            assert (one.received_bytes > 0) == (len(one.said) > 1 or place is not draws[0])
        found |= members[0].said
    assert found.keys() == expected.keys()
    for key, (token_ids, logprobs) in found.items():
        assert token_ids == expected[key][0]
        assert logprobs == pytest.approx(expected[key][1], abs=1e-9)
    firsts = [of_ranks[place["ranks"][0]] for place in draws]
    assert sum(one.num_prefilled for one in firsts) == len(ASKED), "the last token of each prompt"
    computed = [uid for place in computes for uid in of_ranks[place["ranks"][-1]].computed]
    assert sorted(computed) == [one.prompt.uid for one in ASKED]
    if ahead:
        assert sum(len(one.through) for one in firsts) == len(ASKED)


@pytest.mark.parametrize("ahead", [True, False])
def test_between_two_processes(two: Group, ahead: bool) -> None:
    check(two, [{"ranks": (1,)}], [{"ranks": (0,)}], ahead=ahead)


@pytest.mark.parametrize(
    ("name", "ahead"), slow_but([("tp2 to pp2", False)], [(n, a) for n in ON_FOUR for a in (True, False)])
)
def test_between_instances_that_divide_heads_and_layers(four: Group, name: str, ahead: bool) -> None:
    check(four, *ON_FOUR[name], ahead=ahead)

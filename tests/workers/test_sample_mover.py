"""Samples that move between instances on real processes: they go on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest

from plait.launch.interface import Group
from plait.workers.sample_offers import Lack
from tests.workers.sample_moves import Found, Said, alone

LIMIT_S = 120.0


def ask(group: Group, function: str, *arguments: Any) -> list[Any]:
    handle = group.submit(range(group.num_ranks), "run", "tests.workers.sample_moves", function, *arguments)
    return handle.result(LIMIT_S)


def all_said(found: list[Found | None]) -> Said:
    return {key: said for one in found if one is not None for key, said in one.said.items()}


@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("bfloat16", True), ("float32", False)])
def test_samples_go_on_in_another_process(two: Group, dtype: str, exact: bool) -> None:
    """In exact mode to the same bits. In the first stage prompts travel once for all their samples, in the second what
    was said meanwhile; every byte is one that was planned."""
    source, target = ask(two, "one_to_one", "llama", dtype, exact)
    assert source.wrong == target.wrong == []
    assert source.said.keys() == {(9, 0), (0, 1)}
    expected, found = alone("llama", dtype, exact), all_said([source, target])
    if exact:
        assert found == expected
    else:
        assert {key: said[0] for key, said in found.items()} == {key: said[0] for key, said in expected.items()}
    assert target.num_prefilled == 0, "nothing is computed again"
    [move] = target.moves
    bulk, rest = target.lacks
    prompts = (Lack(0, -1, 0, 19), Lack(1, -1, 0, 7), Lack(2, -1, 0, 40))
    assert bulk == (*prompts, *(Lack(0, index, 19, 21) for index in range(3)), Lack(1, 0, 7, 8))
    ends = (Lack(0, 0, 21, 23), Lack(0, 2, 21, 23), Lack(1, 0, 8, 10), Lack(2, 0, 40, 42), Lack(2, 1, 40, 42))
    assert rest == ends
    token_bytes = 2 * (2 + 2) * 8 * (4 if dtype == "float32" else 2)
    assert move.ahead is not None
    for report, lacks in ((move.ahead, bulk), (move.report, rest)):
        assert report.received == {0: token_bytes * sum(lack.length for lack in lacks)}
    # Prompts have 1, 0 and 2 full blocks, which their 2, 1 and 2 samples share; each has one block of its own.
    assert target.num_held == [1, 1 + (1 + 2) + 1 + (2 + 2)]


@pytest.mark.parametrize(
    ("case", "lacks", "blocks"),
    [
        ("", ([(-1, 0, 40), (0, 40, 41)], [(-1, 32, 40), (1, 40, 41)], [(1, 41, 42)]), 4),
        (
            "the other has ended",
            ([(-1, 0, 40), (0, 40, 41)], [(-1, 32, 40), (1, 40, 41)], [(-1, 0, 32), (1, 41, 42)]),
            3,
        ),
        ("computed again", ([(-1, 0, 40), (0, 40, 41)], [(-1, 32, 40), (1, 40, 41)], [(-1, 32, 40), (1, 40, 43)]), 4),
        ("other weights", ([], [], []), 3),
        ("other weights, kept", ([(0, 0, 41)], [(1, 0, 41)], [(1, 41, 42)]), 6),
        ("recompute", ([(-1, 0, 40), (0, 40, 41)], [(-1, 32, 40), (1, 40, 41)], []), 4),
        ("given up", ([(-1, 0, 40), (0, 40, 41)], [(-1, 32, 40), (1, 40, 41)], []), 3),
    ],
)
def test_a_prompt_that_is_there_is_shared(two: Group, case: str, lacks: Any, blocks: int) -> None:
    """Its full blocks, 32 of 40 tokens, are not sent again, nor held twice: as long as they are there, and of the same
    weights."""
    source, target = ask(two, "in_turn", case)
    assert source.wrong == target.wrong == []
    assert [list(lacks) for lacks in target.lacks] == [[Lack(2, *each) for each in stage] for stage in lacks]
    assert target.num_held == [blocks]
    expected, found = alone("llama", "float32"), all_said([source, target])
    assert found.keys() == ({(2, 1)} if case == "the other has ended" else {(2, 0), (2, 1)})
    assert ((2, 1) in source.said) == (case == "given up")
    for key, (token_ids, _) in found.items():
        assert token_ids == expected[key][0]


SIZES = {
    "1": {"ranks": (0,)},
    "other 1": {"ranks": (3,)},
    "tp2": {"ranks": (1, 2), "tp": 2},
    "pp2": {"ranks": (2, 0), "pp": 2, "stages": (1, 1)},
    "tp4": {"ranks": (3, 2, 1, 0), "tp": 4},
    "tp2 pp2": {"ranks": (0, 1, 2, 3), "tp": 2, "pp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        *(("llama", *pair) for pair in [("1", "tp2"), ("tp2", "1"), ("pp2", "1"), ("1", "pp2"), ("pp2", "tp2")]),
        *(("llama", *pair) for pair in [("tp4", "1"), ("1", "tp4"), ("tp2 pp2", "tp4"), ("tp4", "pp2")]),
        *((family, "other 1", "tp2") for family in ("olmo2", "phi3", "gpt_neox", "deepseek_v3", "gemma2")),
        *((family, "tp2", "pp2") for family in ("olmo2", "phi3", "gpt_neox", "deepseek_v3", "gemma2")),
        *((family, "tp4", "tp2") for family in ("olmo2", "gemma2")),
    ],
)
def test_instances_of_any_shape(four: Group, family: str, before: str, after: str) -> None:
    """Heads and layers are divided anew; ranks that share a key-value head, and ranks in both instances, too."""
    found = [one for one in ask(four, "between", SIZES[before], SIZES[after], family) if one is not None]
    assert [one.wrong for one in found] == [[]] * len(found)
    said, expected = all_said(found), alone(family, "float64")
    assert {key: tokens for key, (tokens, _) in said.items()} == {key: tokens for key, (tokens, _) in expected.items()}
    for key, (_, logprobs) in said.items():
        assert logprobs == pytest.approx(expected[key][1], abs=1e-9)
    assert all(one.num_prefilled == 0 for one in found), "nothing is computed again"

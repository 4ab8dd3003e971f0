"""Samples that move between instances, on real processes and between two engines of one: they go on as if nothing had
happened."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plait.data.records import Sample
from plait.generation.engine import Engine, drain
from plait.generation.moves import SampleMoves
from plait.generation.settings import SamplingSettings
from plait.launch.group import Group
from plait.layout.mesh import Layout
from plait.models.parallel.peers import Peers
from plait.policy.step import Key
from plait.schedule.work import to_the_end
from plait.workers.sample_mover import End, SampleMover
from plait.workers.sample_offers import Lack
from tests.cases import examples, slow_but
from tests.generation.requests import with_head
from tests.generation.scripted_drafter import MISLEADING
from tests.generation.test_engine import by_uid
from tests.models.tiny import shared_model
from tests.training.exact import ExactFloat64
from tests.workers.said import Said
from tests.workers.sample_moves import LONGER, OTHER, STAY, Seen, alone

LIMIT_S = 120.0
HERE = Layout.on((0,))


def ask(group: Group, function: str, *arguments: Any) -> list[Any]:
    handle = group.submit(range(group.num_ranks), "run", "tests.workers.sample_moves", function, *arguments)
    return handle.result(LIMIT_S)


def all_said(seen: list[Seen | None]) -> Said:
    return {key: said for one in seen if one is not None for key, said in one.said.items()}


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
    ("dtype", "stages"), slow_but([("float32", 1)], [("float32", 1), ("float32", 2), ("bfloat16", 2)])
)
def test_samples_that_leave_in_the_middle_of_drafts_say_the_same(two: Group, dtype: str, stages: int) -> None:
    """Tokens and log-probs to the same bits, at once and ahead, from what was drafted on both sides; and the target
    knows of every kind of draft what the source knew, or more."""
    source, target = ask(two, "drafting", dtype, stages)
    assert source.wrong == target.wrong == []
    assert source.said.keys() == {(9, 0)}
    assert all_said([source, target]) == alone("llama", dtype, True, asked=(*LONGER, STAY, OTHER))
    assert source.drafted[0] > 0
    assert target.drafted[0] > 0
    [(trials, hits)], [(trials_there, hits_there)] = source.learned, target.learned
    assert hits.sum() > 0, "draft tokens were accepted in the source"
    taken = trials_there == trials
    assert (trials_there >= trials).all()
    assert (hits_there[taken] == hits[taken]).all()
    assert (taken & (trials > 0)).any()


@pytest.mark.parametrize(("drafter", "stages"), slow_but([("wrong at last", 2)], itertools.product(MISLEADING, (1, 2))))
def test_samples_that_leave_while_drafts_mislead_say_the_same(two: Group, drafter: str, stages: int) -> None:
    source, target = ask(two, "drafting", "float32", stages, drafter)
    assert source.wrong == target.wrong == []
    assert source.said.keys() == {(9, 0)}
    assert all_said([source, target]) == alone("llama", "float32", True, asked=(*LONGER, STAY, OTHER))
    assert source.drafted[0] > 0
    assert target.drafted[0] > 0


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
    seen = [one for one in ask(four, "between", SIZES[before], SIZES[after], family) if one is not None]
    assert [one.wrong for one in seen] == [[]] * len(seen)
    said, expected = all_said(seen), alone(family, "float64")
    assert {key: tokens for key, (tokens, _) in said.items()} == {key: tokens for key, (tokens, _) in expected.items()}
    for key, (_, logprobs) in said.items():
        assert logprobs == pytest.approx(expected[key][1], abs=1e-9)
    assert all(one.num_prefilled == 0 for one in seen), "nothing is computed again"


@settings(max_examples=examples(3, 8), deadline=None, phases=[Phase.generate])
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(2, 20), min_size=1, max_size=3), st.integers(0, 1)),
        min_size=1,
        max_size=3,
    ),
    pool=st.sampled_from([None, 64, 96]),
    cache=st.sampled_from([0, 32, 200]),
    stages=st.lists(
        st.tuples(
            st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2))),
            st.sampled_from(["ahead", "ahead", "at once", "recompute", "some"]),
            st.integers(0, 4),
        ),
        min_size=1,
        max_size=4,
    ),
    recompute=st.integers(0, 8),
)
def test_samples_that_move_say_the_same(asked, pool, cache, stages, recompute) -> None:
    """Any samples, at any token, ahead or at once or computed again, into a pool that may be too small or have their
    beginnings, from a source that may compute all again on the way: and nothing is left over in either pool."""
    options = {"max_running": 4, "max_prefill_tokens": 25, "prefix_cache_tokens": cache}
    source = Engine(shared_model(), SamplingSettings(**options))
    target = Engine(shared_model(), SamplingSettings(**options, kv_tokens=pool))
    mover = SampleMover(Peers.alone(), End(HERE, source), End(HERE, target))
    delivered: list[Sample] = []
    with ExactFloat64():
        for uid, (size, lengths, head) in enumerate(asked):
            source.add(with_head(uid, size, lengths, head))
            delivered += source.step()
        target.add(with_head(9, 20, [30], 0))
        for number, (keys, how, count) in enumerate(stages):
            here: list[Key] = [key for key in sorted(keys) if key in SampleMoves(source.state).started]
            if how == "ahead":
                prompts = [
                    with_head(uid, size, lengths, head).prompt for uid, (size, lengths, head) in enumerate(asked)
                ]
                mover.take(mover.give(here, mover.here(prompts), number), number)
            else:
                again = here if how == "recompute" else here[::2] if how == "some" else ()
                to_the_end(mover.moving(here, recompute=again))
            assert (how != "ahead") == all(key not in SampleMoves(source.state).started for key in here) or not here
            if number == recompute:
                source.update_weights(source.policy_version)
            for engine in (source, target):
                for _ in range(count):
                    delivered += engine.step() if engine.has_work else []
        for engine in (source, target):
            delivered += drain(engine)
            blocks = engine.state.scheduler.blocks
            assert blocks.num_held == 0
            assert blocks.num_cached * 16 <= cache
            assert (engine.occupancy.kv_bytes == 0) == (blocks.num_cached == 0)
        said = {key: one for key, one in by_uid(delivered).items() if key != "9.0"}
        alone = Engine(shared_model(), SamplingSettings())
        for uid, (size, lengths, head) in enumerate(asked):
            alone.add(with_head(uid, size, lengths, head))
        expected = by_uid(drain(alone))
    assert {key: one.token_ids for key, one in said.items()} == {key: one.token_ids for key, one in expected.items()}
    for key, one in said.items():
        assert one.logprobs == pytest.approx(expected[key].logprobs, abs=1e-9)

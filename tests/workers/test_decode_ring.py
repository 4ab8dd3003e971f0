"""Stages that decode as a ring, on real processes: samples are those of one process, whatever is in flight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.generation.request import Request
from plait.kernels import paged_attention
from plait.launch.failures import WorkerError
from plait.launch.group import Group
from plait.launch.local import LocalProcesses
from tests.cases import examples, slow_but
from tests.generation.requests import request, with_head
from tests.generation.scripted_drafter import MISLEADING
from tests.models.parallel.team_workers import TeamWorker
from tests.workers.ring_runs import Seen, alone

LIMIT_S = 120.0
NARROW = (torch.float32, torch.bfloat16)
needs_vectors = pytest.mark.skipif(not all(map(paged_attention.fast, NARROW)), reason="no numba, or a CPU without AVX2")


def ask(group: Group, function: str, *arguments: Any) -> list[Seen]:
    handle = group.submit(range(group.num_ranks), "run", "tests.workers.ring_runs", function, *arguments)
    seen = handle.result(LIMIT_S)
    assert all(one.said == seen[0].said for one in seen), "every rank of an instance says the same"
    assert [one.left for one in seen] == [0] * len(seen), "nothing is left in a pool"
    return seen


def equals(seen: list[Seen], requests: Sequence[Request], *, exact: bool, kinds: str = "") -> None:
    expected = alone(requests, kinds=kinds, exact=exact)
    got = seen[0].said
    if exact:
        assert got == expected
        return
    assert {key: tokens for key, (tokens, _) in got.items()} == {key: tokens for key, (tokens, _) in expected.items()}
    for key, (_, logprobs) in got.items():
        assert logprobs == pytest.approx(expected[key][1], abs=1e-11), key


ALL_AT_ONCE = [request(uid, 5 + 3 * uid, [6, 6]) for uid in range(4)]
"""Eight samples that end in the same round."""
AT_THE_FIRST = [request(0, 9, [1, 1, 1]), request(1, 30, [1, 7]), request(2, 4, [12])]
"""Ends at the first token, and far apart."""
BY_THEMSELVES = [request(uid, 6 + uid, num_samples=3, max_tokens=9) for uid in range(3)]
"""At a stop token, or at the limit."""


ALIKE = [with_head(uid, 40 + 4 * uid, [6, 9]) for uid in range(4)]
"""Prompts that begin with the same two blocks."""


ASKED = {"at once": ALL_AT_ONCE, "first": AT_THE_FIRST, "stop": BY_THEMSELVES, "alike": ALIKE}
QUICK = [*(("at once", groups) for groups in (1, 2, 3, 4)), ("first", 3), ("stop", 2), ("alike", 3)]


@pytest.mark.parametrize(("name", "groups"), slow_but(QUICK, itertools.product(ASKED, (1, 2, 3, 4))))
def test_two_stages_say_what_one_process_says(two: Group, name: str, groups: int) -> None:
    """G = 1, P, P + 1, 2 P, to the bit."""
    requests = ASKED[name]
    seen = ask(two, "generated", {"pp": 2}, {"decode_groups": groups, "exact": True}, requests)
    equals(seen, requests, exact=True)
    assert seen[0].in_flight == seen[1].in_flight
    most = max(seen[0].in_flight)
    assert most == groups if name == "at once" else most <= groups, "few are left of those that end early"


def test_samples_come_back_while_all_others_are_in_flight(two: Group) -> None:
    """So the step in which they come computes nothing. After three steps one of the others has ended."""
    requests = [request(0, 9, [8, 12]), request(1, 30, [1, 7]), request(2, 30, [3])]
    seen = ask(two, "back_beside", 3, 3, 3, requests)
    equals(seen, requests, exact=True)


LONG = [request(0, 9, [20, 17]), request(1, 45, [18, 30]), request(2, 4, [16]), with_head(3, 40, [19, 24])]
"""Long enough for weights to be packed."""


@needs_vectors
@pytest.mark.parametrize(("dtype", "groups", "rank"), [("float32", 2, 0), ("bfloat16", 3, 0), ("bfloat16", 2, 3)])
def test_compiled_stages_say_what_a_compiled_whole_says(two: Group, dtype: str, groups: int, rank: int) -> None:
    """To the bit, without exact mode: stages are parts of the same function, with an adapter that adds nothing, too."""
    how = {"decode_groups": groups, "max_prefill_tokens": 32, "speculation": "off"}
    seen = ask(two, "generated", {"pp": 2, "rank": rank}, how, LONG, dtype)
    assert [one.not_compiled for one in seen] == [None, None]
    assert max(seen[0].in_flight) == groups
    assert seen[0].said == alone(LONG, dtype, max_prefill_tokens=32, speculation="off")


@needs_vectors
def test_ranks_that_share_layers_read_packed_weights(two: Group) -> None:
    seen = ask(two, "generated", {"tp": 2}, {"speculation": "off"}, LONG, "float32")
    assert [one.not_compiled for one in seen] == ["ranks share its layers"] * 2
    assert [one.was_packed for one in seen] == [True, True]
    expected = alone(LONG, "float32", speculation="off")
    for key, (tokens, logprobs) in seen[0].said.items():
        assert (tokens, logprobs) == (expected[key][0], pytest.approx(expected[key][1], abs=1e-4)), key


@needs_vectors
@pytest.mark.parametrize("refused", [0, 1])
def test_a_stage_whose_layers_are_not_compiled_is_one_for_all(two: Group, refused: int) -> None:
    """They order the rows of a step alike."""
    how = {"decode_groups": 2, "max_prefill_tokens": 32, "speculation": "off"}
    seen = ask(two, "generated", {"pp": 2}, how, LONG, "float32", refused)
    reasons = [one.not_compiled for one in seen]
    assert reasons[1 - refused] == "the layers of another stage are not compiled"
    expected = alone(LONG, "float32", max_prefill_tokens=32, speculation="off")
    assert {key: tokens for key, (tokens, _) in seen[0].said.items()} == {key: t for key, (t, _) in expected.items()}


STATED = [("SASS", 3, False), ("SSAA", 2, False), ("AASS", 1, False), ("SASS", 2, True), ("SSSA", 3, True)]


@pytest.mark.parametrize("kinds", slow_but(["SAS"], ["SAS", "SSAS"]))
def test_ranks_keep_the_states_of_their_heads(two: Group, kinds: str) -> None:
    """In a pool that is too small, prompts in chunks."""
    requests = [request(uid, 20, [16, 16]) for uid in range(3)]
    seen = ask(two, "generated", {"tp": 2, "kinds": kinds}, {"kv_tokens": 112, "max_prefill_tokens": 24}, requests)
    equals(seen, requests, exact=False, kinds=kinds)
    assert seen[0].preempted > 0


@pytest.mark.parametrize(("kinds", "groups", "exact"), slow_but([("SASS", 3, False)], STATED))
def test_stages_keep_the_states_of_their_layers(two: Group, kinds: str, groups: int, exact: bool) -> None:
    """Stages that have none, and such as have nothing else; in a pool that is too small, prompts in chunks."""
    requests = [request(uid, 20, [16, 16]) for uid in range(3)]
    how = {"decode_groups": groups, "kv_tokens": 112, "max_prefill_tokens": 24, "exact": exact}
    seen = ask(two, "generated", {"pp": 2, "kinds": kinds}, how, requests)
    equals(seen, requests, exact=exact, kinds=kinds)
    assert seen[0].preempted > 0
    assert max(seen[0].in_flight) == groups


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 4, 5, 8])
@pytest.mark.parametrize("name", ASKED)
def test_four_stages_say_what_one_process_says(four: Group, groups: int, name: str) -> None:
    seen = ask(four, "generated", {"pp": 4}, {"decode_groups": groups, "exact": True}, ASKED[name])
    equals(seen, ASKED[name], exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_ranks_that_share_layers_are_stages_together(four: Group, groups: int) -> None:
    requests = [*ALL_AT_ONCE, request(9, 40, [3, 17]), *(with_head(10 + uid, 40, [7]) for uid in range(3))]
    seen = ask(four, "generated", {"tp": 2, "pp": 2}, {"decode_groups": groups}, requests)
    equals(seen, requests, exact=False)


@settings(max_examples=examples(4, 60))
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["auto", 1, 2, 3, 4]),
    st.integers(1, 9),
    st.sampled_from([8, 4096]),
)
def test_any_lengths(
    two: Group, drawn: list[tuple[int, list[int], bool]], groups: Any, max_running: int, max_prefill_tokens: int
) -> None:
    """Messages are received ahead (which exact mode does not do), prompts come in chunks and begin alike, few places
    are filled again and again."""
    requests = [
        (with_head if alike else request)(uid, tokens, lengths) for uid, (tokens, lengths, alike) in enumerate(drawn)
    ]
    how = {"decode_groups": groups, "max_running": max_running, "max_prefill_tokens": max_prefill_tokens}
    equals(ask(two, "generated", {"pp": 2}, how, requests), requests, exact=False)


def test_shares_are_equal_and_get_smaller_as_samples_end(two: Group) -> None:
    requests = [request(uid, 8, [2, 20]) for uid in range(6)]
    seen = ask(two, "generated", {"pp": 2}, {"decode_groups": 2}, requests)
    equals(seen, requests, exact=False)
    rows = seen[0].rows
    assert max(rows[2:]) == 6
    assert set(rows[-20:-2]) == {3}, "six samples are left of twelve, three in each step"
    assert set(seen[0].running[-20:-2]) == {6}


@pytest.mark.parametrize("groups", slow_but([3], [2, 3]))
def test_a_pool_that_is_too_small_lands_all_before_anybody_gives_way(two: Group, groups: int) -> None:
    requests = [request(uid, 20, [16, 16]) for uid in range(3)]
    how = {"decode_groups": groups, "kv_tokens": 112, "exact": True}
    seen = ask(two, "generated", {"pp": 2}, how, requests)
    equals(seen, requests, exact=True)
    assert seen[0].preempted > 0
    assert max(seen[0].in_flight) == groups


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_drafts_within_the_ring(two: Group, groups: int) -> None:
    """Greedy samples of one prompt repeat themselves; what is drafted changes no sample."""
    requests = [request(uid, 12, [30, 30, 30], temperature=0.0) for uid in range(2)]
    seen = ask(two, "generated", {"pp": 2}, {"decode_groups": groups, "speculation": 4, "exact": True}, requests)
    equals(seen, requests, exact=True)
    assert max(one.drafted for one in seen) >= 10


@pytest.mark.parametrize("sizes", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.slow)], ids=["tp", "pp"])
def test_drafts_change_no_bit_of_an_instance_of_two_ranks(two: Group, sizes: dict[str, int]) -> None:
    """With filters, and chunks of prompts that samples share."""
    requests = [request(uid, 40, [20, 14], temperature=0.1, top_k=40, top_p=0.95) for uid in range(2)]
    how = {"exact": True, "max_prefill_tokens": 16}
    plain, seen = (ask(two, "generated", sizes, how | {"speculation": drafts}, requests) for drafts in ("off", 4))
    assert seen[0].said == plain[0].said
    assert max(one.drafted for one in plain) == 0
    assert max(one.drafted for one in seen) >= 10


UNLIKE = [
    request(0, 20, [14, 18], temperature=0.0),
    request(1, 20, [12, 20], temperature=0.7, top_k=40, top_p=0.95),
    request(2, 33, num_samples=2, max_tokens=16),
]
"""Greedy, filtered, and such as stop by themselves."""
BESIDE = {
    "chunks": {"max_prefill_tokens": 16, "max_running": 3},
    "a small pool": {"kv_tokens": 64},
}
SIZES = {"tp": {"tp": 2}, "pp": {"pp": 2}, "ring": {"pp": 2, "groups": 3}}
MISLED = [("ring", "a small pool", "at random")]


@pytest.fixture(scope="module")
def not_misled() -> dict[tuple[str, str], Seen]:
    return {}


@pytest.mark.parametrize(("sizes", "beside", "drafter"), slow_but(MISLED, itertools.product(SIZES, BESIDE, MISLEADING)))
def test_drafts_that_mislead_change_no_bit_of_an_instance_of_two_ranks(
    two: Group, sizes: str, beside: str, drafter: str, not_misled: dict[tuple[str, str], Seen]
) -> None:
    """Whatever a step has beside: chunks of prompts, samples that give way."""
    ranks = {name: size for name, size in SIZES[sizes].items() if name != "groups"}
    how = {"exact": True, "decode_groups": SIZES[sizes].get("groups", 1)} | BESIDE[beside]
    if (plain := not_misled.get((sizes, beside))) is None:
        plain = ask(two, "generated", ranks, how | {"speculation": "off"}, UNLIKE)[0]
        not_misled[sizes, beside] = plain
    seen = ask(two, "misled", ranks, how, UNLIKE, drafter)
    assert seen[0].said == plain.said
    assert sorted(one.drafted >= 10 for one in seen) == [False, True]
    if sizes != "ring":
        assert (seen[0].preempted > 0) == (plain.preempted > 0) == (beside == "a small pool")
    elif (sizes, beside, drafter) in MISLED:  # else it depends on how many tokens each step gave
        assert seen[0].preempted > 0


@pytest.mark.parametrize("groups", slow_but([3], [1, 2, 3]))
def test_samples_come_and_go_and_weights_change_while_others_are_in_flight(two: Group, groups: int) -> None:
    """All steps in flight land first; who was taken out had said the beginning of what it would have said."""
    requests = [request(uid, 9 + uid, [9, 14]) for uid in range(4)]
    seen = ask(two, "disturbed", groups, requests)[0]
    expected = alone(requests, exact=True)
    taken, _ = seen.said.pop((1, -1))
    assert 0 < len(taken) < 9
    assert taken == expected.pop((1, 0))[0][: len(taken)]
    assert seen.said == expected


@pytest.mark.parametrize("groups", [1, 3])
def test_one_rank_says_what_a_step_begins_with_and_goes_on(two: Group, groups: int) -> None:
    requests = [request(uid, 7, [12, 12]) for uid in range(3)]
    seen = ask(two, "locked", groups, requests)
    equals(seen, requests, exact=False)
    for stage, one in enumerate(seen):
        assert (one.use.stage, one.use.num_stages) == (stage, 2)
        assert 0 <= one.use.waited_s < one.use.seconds
        assert one.use.groups / one.use.steps > (2 if groups == 3 else 0.99)


def test_a_stage_that_stands_still_is_named() -> None:
    """Nobody waits without end, and who waits says for whom."""
    with LocalProcesses(threads=1).start(TeamWorker, 2) as group:
        requests = [request(uid, 7, [30, 30]) for uid in range(3)]
        handle = group.submit(range(2), "run", "tests.workers.ring_runs", "stalled", 1, 1.0, requests)
        with pytest.raises(WorkerError, match=r"rank 0 expected rank 1 to take part in (recv|send) .* within 1 s"):
            handle.result(LIMIT_S)
        group.close(grace_s=0.0)  # that one sleeps on

"""Ranks that divide a model replay captured steps together, on real processes: samples are those of one process, and
what one rank cannot do, none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from plait.launch.group import Group
from tests.cases import slow_but
from tests.generation.requests import request, with_head
from tests.models.tiny import VOCAB_SIZE
from tests.workers.replayed_runs import Replayed
from tests.workers.ring_runs import LAYERS
from tests.workers.test_decode_ring import LIMIT_S, equals

REQUESTS = [request(0, 9, [1, 9, 5]), request(1, 30, [7]), *(with_head(2 + uid, 24, [6]) for uid in range(2))]

FUSED = ("", "eager", "inductor")
HIDDEN_SIZE = 32
SUMS = 1 + 2 * LAYERS
"""Over the ranks: of embeddings, of attention and of the MLP of each layer. Two ranks exchange a sum's bytes once."""


def ask(group: Group, sizes: dict[str, int], groups: int = 1, **how: Any) -> list[Replayed]:
    settings = {"max_prefill_tokens": 20, "decode_groups": groups}
    arguments = ("tests.workers.replayed_runs", "replayed", sizes, settings, REQUESTS, how)
    seen: Sequence[Replayed] = group.submit(range(group.num_ranks), "run", *arguments).result(LIMIT_S)
    assert [one.left for one in seen] == [0] * len(seen), "nothing is left in a pool"
    assert all(one.said == seen[0].said for one in seen), "every rank says the same"
    equals(seen, REQUESTS, exact=False)  # type: ignore[arg-type]
    if not how.get("fails"):
        assert len({(*one.captures, one.replays) for one in seen}) == 1
    return list(seen)


@pytest.mark.parametrize(("fused", "rank"), slow_but([("eager", 3)], [(by, rank) for by in FUSED for rank in (0, 3)]))
def test_ranks_that_share_layers_replay_what_one_process_computes(two: Group, fused: str, rank: int) -> None:
    """Sums over ranks stand within layers that a compiler takes as a whole; adapters add none."""
    for one in ask(two, {"tp": 2, "rank": rank}, fused=fused):
        assert one.refusals == {}
        assert one.replays > 10
        assert one.captures[0] > 1
        assert one.captures[2] == 0, "weights and pool are where they were"
        assert any(size.chunk_rows for size in one.received_bytes), "prompts beside samples that decode"
        for size, received_bytes in one.received_bytes.items():
            num_rows, of_head = size.rows + size.chunk_rows, VOCAB_SIZE // 2 * size.has_head
            assert received_bytes == num_rows * 8 * (SUMS * HIDDEN_SIZE + of_head)


@pytest.mark.parametrize(
    ("groups", "fused"), slow_but([(3, "eager")], [(groups, by) for groups in (1, 2, 3) for by in ("", "eager")])
)
def test_stages_replay_what_is_between_what_they_send(two: Group, groups: int, fused: str) -> None:
    """With steps of other samples in flight, which compute in the same memory."""
    for one in ask(two, {"pp": 2}, groups, fused=fused):
        assert one.refusals == {}
        assert one.replays > 10
        assert set(one.received_bytes.values()) == {0}, "what comes from the stage before is no part of a graph"


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["", "try", "capture", "equal"])
def test_ranks_that_share_layers_are_stages_together(four: Group, fails: str) -> None:
    """Rank 1 shares the first half of the layers with rank 0: the other half has graphs, whatever it cannot do."""
    seen = ask(four, {"tp": 2, "pp": 2}, 2, fused="eager", fails=fails)
    assert [bool(one.refusals) for one in seen] == [bool(fails)] * 2 + [False] * 2
    assert all(one.replays > 10 for one in (seen if fails != "capture" else seen[2:]))


@pytest.mark.parametrize("fails", ["try", "capture", "equal"])
def test_what_one_rank_cannot_do_none_does(two: Group, fails: str) -> None:
    """Rank 1 cannot compute by fused layers alone, or breaks off when a step is captured, or computes another thing."""
    first, second = ask(two, {"tp": 2}, fused="eager", fails=fails)
    assert "fused" in first.refusals
    assert first.refusals.keys() == second.refusals.keys()
    assert "another rank cannot" in first.refusals["fused"] or fails == "equal"
    own = {"try": "no such kernel", "capture": "not permitted", "equal": "of their size off"}[fails]
    assert own in second.refusals["fused"]
    assert (first.replays > 10) == (fails != "capture"), "plain layers are captured, which no rank can at last"


def test_prompts_that_one_rank_cannot_replay_all_launch(two: Group) -> None:
    """Decoding keeps its graphs."""
    first, second = ask(two, {"tp": 2}, fused="eager", fails="prompts")
    assert list(first.refusals) == list(second.refusals) == ["with prompts"]
    assert "another rank cannot" in first.refusals["with prompts"]
    assert "not permitted" in second.refusals["with prompts"]
    assert first.received_bytes == second.received_bytes
    assert {size.has_head for size in first.received_bytes} == {True}
    assert first.replays > 10


@pytest.mark.parametrize("how", ["moves", "drops"])
def test_where_something_has_moved_on_one_rank_all_capture_again(two: Group, how: str) -> None:
    for one in ask(two, {"tp": 2}, **{how: True}):
        assert one.refusals == {}
        assert one.captures[2] == one.captures[0] + one.captures[1] > 1

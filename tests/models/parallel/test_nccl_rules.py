"""Ranks keep NCCL's rules: what they post to gloo is played again as NCCL would run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from plait.layout.mesh import Layout
from plait.models.parallel import nccl
from plait.models.parallel import reduce_scatter as pieces
from plait.models.parallel.reduce_scatter import reduce_scatter
from tests.cases import slow_but
from tests.launch.groups import group_of
from tests.models.parallel import partial_cases
from tests.models.parallel.team_workers import TeamWorker
from tests.nccl_rules import Broken, Log, Op, Post, played, recording

ALL: Any = (0, (0, 1))
ONE = (1, "torch.float32")


def alone(number: int, kind: str, peer: int, rank: int, tag: int = 0) -> Post:
    return Post(number, ALL, (min(rank, peer), max(rank, peer)), (Op(kind, peer, ONE, tag),))


def batch(number: int, *ops: tuple[str, int]) -> Post:
    return Post(number, ALL, None, tuple(Op(kind, peer, ONE) for kind, peer in ops))


def reduced(number: int) -> Post:
    return Post(number, ALL, None, (Op("all_reduce", None, ONE),))


def test_what_keeps_the_rules_ends():
    logs: dict[int, Log] = {
        0: [reduced(0), 0, batch(2, ("recv", 1), ("send", 1)), 2, alone(4, "send", 1, 0), alone(5, "recv", 1, 0), 4, 5],
        1: [reduced(0), 0, batch(2, ("recv", 0), ("send", 0)), 2, alone(4, "recv", 0, 1), alone(5, "send", 0, 1), 4, 5],
    }
    assert played(logs) == 8


def test_two_that_receive_before_they_send_wait_for_each_other():
    logs: dict[int, Log] = {
        rank: [alone(0, "recv", 1 - rank, rank), alone(1, "send", 1 - rank, rank), 0, 1] for rank in (0, 1)
    }
    with pytest.raises(Broken, match=r"rank 0: recv rank 1.*\n.*rank 1: recv rank 0"):
        played(logs)


def test_the_first_batch_of_a_group_waits_for_all_its_ranks():
    three: Any = (1, (0, 1, 2))
    first = {
        0: [Post(0, three, None, (Op("send", 1, ONE),)), 0],
        1: [Post(0, three, None, (Op("recv", 0, ONE),)), 0],
        2: [],
    }
    with pytest.raises(Broken, match="wait for each other"):
        played(first)
    met = Post(10, three, None, (Op("all_reduce", None, ONE),))
    assert played({rank: [met, 10, *log] for rank, log in first.items()}) == 5


def test_the_first_message_in_a_direction_stands_still_until_the_other_end_is_there():
    """Rank 1 begins to receive from both others before it sends what rank 2 needs to send."""
    between: Any = (0, (0, 1, 2))

    def message(number: int, kind: str, rank: int, peer: int) -> Post:
        return Post(number, between, (min(rank, peer), max(rank, peer)), (Op(kind, peer, ONE),))

    def logs(there: Sequence[tuple[int, int]]) -> dict[int, Log]:
        """What is sent along `there` before, one message after the other, has connected these."""
        found: dict[int, Log] = {rank: [] for rank in range(3)}

        def post(rank: int, kind: str, peer: int) -> int:
            found[rank].append(message(len(found[rank]), kind, rank, peer))
            return len(found[rank]) - 1

        for sender, receiver in there:
            found[sender].append(post(sender, "send", receiver))
            found[receiver].append(post(receiver, "recv", sender))
        ahead = post(1, "recv", 2)
        found[1].append(post(1, "send", 0))
        found[1].append(ahead)
        found[0].append(post(0, "recv", 1))
        found[0].append(post(0, "send", 2))
        found[2].append(post(2, "recv", 0))
        found[2].append(post(2, "send", 1))
        return found

    with pytest.raises(Broken, match="wait for each other"):
        played(logs([(0, 1), (0, 2), (1, 2)]))
    assert played(logs([(0, 1), (0, 2), (1, 2), (1, 0), (2, 1)])) == 16


def test_messages_meet_by_their_order_and_not_by_their_tag():
    logs: dict[int, Log] = {
        0: [alone(0, "send", 1, 0, tag=1), alone(1, "send", 1, 0, tag=2)],
        1: [alone(0, "recv", 0, 1, tag=2), alone(1, "recv", 0, 1, tag=1)],
    }
    with pytest.raises(Broken, match="another than it is meant for"):
        played(logs)


def test_ranks_that_come_to_other_collectives_are_told():
    other = Post(0, ALL, None, (Op("all_reduce", None, (2, "torch.float32")),))
    with pytest.raises(Broken, match="other collectives"):
        played({0: [reduced(0), 0], 1: [other, 0]})


def test_what_nobody_waits_for_ends_too():
    connects: dict[int, Log] = {0: [alone(0, "send", 1, 0), 0], 1: [alone(0, "recv", 0, 1), 0]}
    with pytest.raises(Broken, match="never end"):
        played({0: [*connects[0], alone(2, "send", 1, 0)], 1: connects[1]})


# --- in processes ----------------------------------------------------------------------------------------------------


class RecordedTeamWorker(TeamWorker):
    def __init__(self, context: Any) -> None:
        self._entered = recording()
        self._log = self._entered.__enter__()
        super().__init__(context)

    def log(self) -> Log:
        return self._log

    def close(self) -> None:
        super().close()
        self._entered.__exit__(None, None, None)


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    yield from group_of(RecordedTeamWorker, 4)


SIZES = [
    {"dp": 1, "tp": 4, "pp": 1},  # two key-value heads: each is that of two ranks
    {"dp": 1, "tp": 2, "pp": 2},
    {"dp": 1, "tp": 1, "pp": 2},
]


@pytest.mark.parametrize("sizes", slow_but([SIZES[1]], SIZES), ids=str)
def test_a_pass_over_parts_keeps_them(four: Any, sizes: dict[str, int]):
    answers = four.submit(range(4), "run", partial_cases.__name__, "compare", "qwen2", sizes).result(120.0)
    assert max(answers[0].values()) < 1e-9
    assert played(dict(enumerate(four.submit(range(4), "log").result(60.0)))) > 100


CUTS = {
    "equal": (0, 8, 16, 24, 32),
    "equal behind others": (3, 11, 19, 27, 35),
    "a line more": (0, 8, 17, 25, 34),
    "some empty": (0, 0, 30, 31, 70),
    "all empty": (5, 5, 5, 5, 5),
}


def sums_of(worker: Any, ranks: tuple[int, ...], cut: str) -> tuple[list[float], bool, list[float]] | None:
    """By NCCL's rules and by messages: this rank's part of a sum, and whether the rest is as it was."""
    team = worker.team_of(Layout.on(ranks, dp=len(ranks)))
    if team is None:
        return None
    bounds = CUTS[cut][: len(ranks) + 1]
    generator = torch.Generator().manual_seed(worker.rank)
    given = torch.randn(bounds[-1] + 5, generator=generator, dtype=torch.float64)
    found, expected = given.clone(), given.clone()
    with patch.object(pieces, "PIECE_ELEMENTS", 7):
        own = reduce_scatter(team.dp, found, bounds)
        with patch.object(nccl, "carries", lambda group, device: False):
            reduce_scatter(team.dp, expected, bounds)
    start, stop = bounds[team.dp.index : team.dp.index + 2]
    rest = torch.cat([found[:start] - given[:start], found[stop:] - given[stop:]])
    return own.tolist(), not rest.any(), expected[start:stop].tolist()


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_the_backends_own_sum_is_that_of_messages(four: Any, ranks: tuple[int, ...], cut: str):
    before = four.submit(range(4), "log").result(60.0)
    answers = four.submit(range(4), "run", __name__, "sums_of", ranks, cut).result(60.0)
    assert [answer is None for answer in answers] == [rank not in ranks for rank in range(4)]
    for answer in answers:
        if answer is not None:
            own, rest_stays, expected = answer
            assert own == pytest.approx(expected, abs=1e-12)
            assert rest_stays
    logs = four.submit(range(4), "log").result(60.0)
    assert played(dict(enumerate(logs))) > 0
    for rank in ranks:
        kinds = {op.kind for event in logs[rank][len(before[rank]) :] if isinstance(event, Post) for op in event.ops}
        assert cut == "all empty" or any(kind.startswith("reduce_scatter") for kind in kinds)


def gathered_over(worker: Any, ranks: tuple[int, ...], cut: str) -> list[tuple[list[float], int]] | None:
    """By NCCL's rules and by messages: a buffer of which each rank has had its part, and how many bytes came."""
    team = worker.team_of(Layout.on(ranks, dp=len(ranks)))
    if team is None:
        return None
    bounds, found = CUTS[cut][: len(ranks) + 1], []
    for carries in (nccl.carries, lambda group, device: False):
        flat, before = torch.full((bounds[-1] + 5,), -1.0), team.dp.traffic.received_bytes
        parts = [flat[low:high] for low, high in pairwise(bounds)]
        parts[team.dp.index].copy_(torch.arange(*bounds[team.dp.index : team.dp.index + 2]))
        with patch.object(nccl, "carries", carries):
            team.dp.all_gather_into(parts)
        found.append((flat.tolist(), team.dp.traffic.received_bytes - before))
    return found


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("cut", CUTS)
def test_the_backends_own_gather_is_that_of_messages(four: Any, ranks: tuple[int, ...], cut: str):
    """NCCL connects each two ranks that send each other messages, at some 380 MB of both: no messages, then."""
    before = four.submit(range(4), "log").result(60.0)
    answers = four.submit(range(4), "run", __name__, "gathered_over", ranks, cut).result(60.0)
    bounds = CUTS[cut][: len(ranks) + 1]
    numbers = [float(at) if bounds[0] <= at < bounds[-1] else -1.0 for at in range(bounds[-1] + 5)]
    for index, rank in enumerate(ranks):
        by_nccl, by_messages = answers[rank]
        came = 4 * (bounds[-1] - bounds[0] - bounds[index + 1] + bounds[index])
        assert by_nccl == by_messages == (numbers, came)
    logs = four.submit(range(4), "log").result(60.0)
    assert played(dict(enumerate(logs))) > 0
    for rank in ranks:
        posts = [event for event in logs[rank][len(before[rank]) :] if isinstance(event, Post)]
        assert cut == "all empty" or posts[-2].ops[0].kind.startswith("all_gather"), "before the messages"


def posted_for_a_pipeline(worker: Any) -> list[tuple[str, int | None]]:
    """(What, to or from whom) of what a stage posts when its team is made."""
    before = len(worker.log())
    assert worker.team_of(Layout.on((3, 1, 2, 0), pp=4)) is not None
    return [(op.kind, op.peer) for event in worker.log()[before:] if isinstance(event, Post) for op in event.ops]


def test_stages_are_connected_in_both_directions_when_their_team_is_made(four: Any):
    """The first message in a direction would stand still later, wherever its rank is then."""
    answers = four.submit(range(4), "run", __name__, "posted_for_a_pipeline").result(60.0)
    for rank, posted in enumerate(answers):
        ways = {(kind, peer) for kind in ("recv", "send") for peer in range(4) if peer != rank}
        assert sorted(ways) == sorted(one for one in posted if one[1] is not None)
    assert played(dict(enumerate(four.submit(range(4), "log").result(60.0)))) > 0

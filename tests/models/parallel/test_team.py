"""Teams: who is whose peer, and what they tell each other, on real processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from plait.errors import RunError
from plait.launch.failures import WorkerError
from plait.layout.mesh import Coordinates, Layout, Mesh, Parallelism
from plait.models.parallel.peers import Peers
from plait.models.parallel.reduce_scatter import reduce_scatter
from plait.models.parallel.team import Team, make_teams
from tests.launch.groups import group_of
from tests.models.parallel.team_workers import TeamWorker

LIMIT_S = 60.0
DTYPES = ("float64", "float32", "bfloat16")


@pytest.fixture(scope="module")
def four() -> Iterator[Any]:
    yield from group_of(TeamWorker, 4)


def answers(group: Any, function: str, *arguments: Any) -> list[Any]:
    return group.submit(range(group.num_ranks), "run", __name__, function, *arguments).result(LIMIT_S)


def test_alone_there_is_nobody_to_tell():
    team = Team.alone(3)
    assert team.coordinates == Coordinates(0, 0, 0)
    assert team.is_first_stage
    assert team.is_last_stage
    x = torch.arange(4.0)
    for peers in (team.dp, team.tp, team.pp, team.ends, team.all):
        assert peers.size == 1
        assert peers.all_reduce(x) is x
        assert peers.broadcast(x, 0) is x
        assert peers.begin_reduce(x, 0).wait() is x
        assert peers.all_gather(x)[0] is x
        assert reduce_scatter(peers, x, (0, 4)).equal(x)
        peers.barrier()
    assert x.tolist() == [0, 1, 2, 3]
    assert make_teams([Layout.on((3,)), Layout.on((4,))], 3)[Layout.on((4,))] is None


def test_what_a_rank_computes_alone_sends_nothing():
    """Sums and whole tensors are its own; what it cannot do alone it does not begin."""
    peers, x = Peers((0, 1), 0), torch.arange(4.0)
    sends = {
        "broadcast": lambda: peers.broadcast(x, 0),
        "begin_reduce": lambda: peers.begin_reduce(x, 0),
        "sum_of_parts": lambda: peers.sum_of_parts(x, x[:2]),
        "all_gather_into": lambda: peers.all_gather_into([x[:2], x[2:]]),
        "send": lambda: peers.send(x, 1, 0),
        "recv": lambda: peers.recv(x, 1, 0),
        "exchange": lambda: peers.exchange([x, x], [x, x], "weights"),
        "barrier": peers.barrier,
    }
    with peers.rehearsing():
        assert peers.all_reduce(x) is x
        assert [part.tolist() for part in peers.all_gather(x[:3], (3, 2))] == [[0, 1, 2], [0, 1]]
        for send in sends.values():
            with pytest.raises(AssertionError, match="while a rank computes alone"):
                send()
    assert not peers.is_rehearsing


# --- run in the workers --------------------------------------------------------------------------------------------

LAYOUTS = [
    Layout.on(range(4), dp=2, tp=2),
    Layout.on((3, 1), pp=2),
    Layout(Mesh((2, 0, 3)), Parallelism(1, 1, 3)),
    Layout.on((2,)),
]


def peers_of(worker: Any) -> list[Any]:
    teams = make_teams(LAYOUTS, worker.rank)
    out = []
    for layout in LAYOUTS:
        team = teams[layout]
        out.append(team and {axis: getattr(team, axis).ranks for axis in ("dp", "tp", "pp", "ends", "all")})
    return out


def collectives(worker: Any, dtype: str) -> dict[str, Any]:
    team = make_teams([Layout.on(range(4), dp=4)], worker.rank, timeout_s=30.0)[Layout.on(range(4), dp=4)]
    assert team is not None
    dp, rank, kind = team.dp, worker.rank, getattr(torch, dtype)
    one = torch.tensor([1.0 + rank, -rank], dtype=kind)
    flat = torch.arange(70, dtype=kind) + rank
    bounds = (0, 0, 30, 31, 70)  # one part is empty
    part = reduce_scatter(dp, flat, bounds)
    assert part.data_ptr() == flat[bounds[rank] :].data_ptr() or not len(part)
    gathered = torch.full((70,), -1.0, dtype=kind)
    gathered[bounds[rank] : bounds[rank + 1]] = rank
    dp.all_gather_into([gathered[start:stop] for start, stop in pairwise(bounds)])
    lengths = [2, 0, 1, 3]
    ragged = dp.all_gather(torch.full((lengths[rank], 2), rank, dtype=kind), lengths)
    right, left = (rank + 1) % 4, (rank - 1) % 4
    late = dp.irecv(torch.empty(2, dtype=kind), left, 7, "late")
    early = dp.irecv(torch.empty(2, dtype=kind), left, 8, "early")
    sends = [dp.isend(torch.full((2,), rank + tag, dtype=kind), right, tag) for tag in (8, 7)]
    moved = early.wait().tolist() + late.wait().tolist()
    for send in sends:
        send.wait()
    return {
        "sum": dp.all_reduce(one.clone()).tolist(),
        "max": dp.all_reduce(one.clone(), "max").tolist(),
        "min": dp.all_reduce(one.clone(), "min").tolist(),
        "broadcast": dp.broadcast(one.clone(), 2).tolist(),
        "reduce": dp.begin_reduce(one.clone(), 2).wait().tolist(),
        "gather": [part.tolist() for part in dp.all_gather(one)],
        "ragged": [part.tolist() for part in ragged],
        "scatter": part.tolist(),
        "flat": gathered.tolist(),
        "moved": moved,
        "empty": dp.all_reduce(torch.empty(0)).numel() + len(dp.all_gather(torch.empty(0))),
    }


def descending(worker: Any) -> list[Any]:
    """Over peers whose ranks do not ascend, by their index."""
    layout = Layout.on((3, 0, 2), dp=3)
    team = make_teams([layout], worker.rank, timeout_s=30.0)[layout]
    if team is None:
        return []
    dp, own = team.dp, torch.tensor([10.0 * team.dp.index])
    parts, every = torch.arange(3.0) + team.dp.index, torch.full((3,), float(team.dp.index))
    dp.all_gather_into([*every.split(1)])
    if dp.index == 0:
        dp.send(own + 7, 2, 5)
    passed = dp.recv(torch.empty(1), 0, 5).tolist() if dp.index == 2 else []
    return [
        dp.index,
        dp.broadcast(own.clone(), 1).tolist(),
        [part.item() for part in dp.all_gather(own)],
        reduce_scatter(dp, parts, (0, 1, 2, 3)).tolist(),
        every.tolist(),
        passed,
    ]


def lonely(worker: Any) -> None:
    """Rank 0 waits for a message that never comes."""
    layout = Layout.on((0, 1), pp=2)
    team = make_teams([layout], worker.rank, timeout_s=0.5, waiting_for=worker.context.waiting_for)[layout]
    if worker.rank == 0:
        assert team is not None
        team.pp.recv(torch.empty(3), 1, 5, "3F0")


def impatient(worker: Any) -> list[str]:
    """What rank 0 says that it waits for, in a collective."""
    said: list[str] = []

    def waiting_for(what: str) -> Any:
        said.append(what)
        return worker.context.waiting_for(what)

    layout = Layout.on(range(4), tp=2, pp=2)
    team = make_teams([layout], worker.rank, waiting_for=waiting_for)[layout]
    assert team is not None
    team.tp.all_reduce(torch.zeros(2, dtype=torch.float64))
    team.all.barrier()
    return said


# --- asked of them -------------------------------------------------------------------------------------------------


def test_peers_of_every_axis(four: Any) -> None:
    found = answers(four, "peers_of")
    both = {"pp": (0,), "ends": (0,), "all": (0, 1, 2, 3)}
    assert found[0][0] == {"dp": (0, 2), "tp": (0, 1), **both}
    assert found[3][0] == {"dp": (1, 3), "tp": (2, 3), "pp": (3,), "ends": (3,), "all": (0, 1, 2, 3)}
    assert found[1][1] == {"dp": (1,), "tp": (1,), "pp": (3, 1), "ends": (3, 1), "all": (3, 1)}
    assert found[0][1] is None
    assert [answer[2] and answer[2]["ends"] for answer in found] == [(0,), None, (2, 3), (2, 3)]
    assert [answer[3] is None for answer in found] == [True, True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_by_hand(four: Any, dtype: str) -> None:
    found = answers(four, "collectives", dtype)
    bounds = (0, 0, 30, 31, 70)
    for rank, one in enumerate(found):
        assert one["sum"] == [10, -6]
        assert one["max"] == [4, 0]
        assert one["min"] == [1, -3]
        assert one["broadcast"] == [3, -2]
        assert rank != 2 or one["reduce"] == [10, -6]
        assert one["gather"] == [[1, 0], [2, -1], [3, -2], [4, -3]]
        assert one["ragged"] == [[[0, 0], [0, 0]], [], [[2, 2]], [[3, 3]] * 3]
        assert one["scatter"] == [4 * i + 6 for i in range(bounds[rank], bounds[rank + 1])]
        assert one["flat"] == [1] * 30 + [2] + [3] * 39
        left = (rank - 1) % 4
        assert one["moved"] == [left + 8] * 2 + [left + 7] * 2
        assert one["empty"] == 4


def test_ranks_that_do_not_ascend(four: Any) -> None:
    both = [[10], [0, 10, 20]]
    assert answers(four, "descending") == [
        [1, *both, [6], [0, 1, 2], []],
        [],
        [2, *both, [9], [0, 1, 2], [7]],
        [0, *both, [3], [0, 1, 2], []],
    ]


def test_waits_say_for_whom(four: Any) -> None:
    found = answers(four, "impatient")
    assert found[0] == ["rank 1 (tp all_reduce sum of 16 bytes)", "ranks 1, 2, 3 (all barrier)"]


def test_a_message_that_does_not_come(four: Any) -> None:
    with pytest.raises(WorkerError, match=r"rank 0 expected rank 1 to take part in recv 3F0 within 0.5 s") as caught:
        answers(four, "lonely")
    assert isinstance(caught.value.__cause__, RunError)


def test_peers_refuse_themselves() -> None:
    with pytest.raises(AssertionError, match="itself"):
        Peers.alone(2).send(torch.zeros(1), 0, 1)

"""What every launcher does alike. A launcher that is added is added to `LAUNCHERS`."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from functools import partial

import pytest

from plait.errors import RunError
from plait.launch.failures import Ended, WorkerError
from plait.launch.local import LocalProcesses
from plait.launch.watch import Watch
from tests.launch.nodes.agents import joined
from tests.launch.nodes.ray_nodes import placed_by_ray
from tests.launch.workers import Closing, Echo, Place, Summing, Unbuildable

LIMIT_S = 60.0


@contextlib.contextmanager
def _local(**options):
    yield LocalProcesses(**options)


@contextlib.contextmanager
def _elsewhere(**options):
    """All ranks on a node that has joined."""
    with joined(1, own=False) as (gathered, _):
        yield LocalProcesses(nodes=gathered.nodes, **options)


@contextlib.contextmanager
def _two_nodes(**options):
    """Half of the ranks here, half on a node that has joined."""
    with joined(2) as (gathered, _):
        yield LocalProcesses(nodes=gathered.nodes, **options)


@contextlib.contextmanager
def _ray(nodes=1, **options):
    """All ranks on one node of a Ray cluster, or half of them on each of two."""
    with placed_by_ray(nodes=nodes) as gathered:
        yield LocalProcesses(nodes=gathered.nodes, **options)


LAUNCHERS = {"local": _local, "elsewhere": _elsewhere, "ray": _ray}
"""Launchers of groups of any size; the others need an even one."""
EVERY = {**LAUNCHERS, "two-nodes": _two_nodes, "ray-two": partial(_ray, nodes=2)}


def _slow(case):
    values = (case,) if isinstance(case, str) else case
    return pytest.param(*values, marks=[pytest.mark.slow] * values[0].startswith("ray"))


def _two_nodes_or_slow(case):
    """Of what takes a group of its own: half of the ranks here and half elsewhere is the most telling."""
    values = (case,) if isinstance(case, str) else case
    return pytest.param(*values, marks=[pytest.mark.slow] * (values[0] != "two-nodes"))


@pytest.fixture(params=[_slow(name) for name in LAUNCHERS], scope="module")
def launcher(request):
    with LAUNCHERS[request.param]() as found:
        yield found


SIZES = [
    ("local", 1),
    ("local", 2),
    ("elsewhere", 2),
    ("two-nodes", 2),
    ("two-nodes", 4),
    ("ray", 2),
    ("ray-two", 4),
]
SIZED = [
    pytest.param(size, marks=[pytest.mark.slow] * (size not in (("local", 2), ("two-nodes", 4))), id=str(size))
    for size in SIZES
]


@pytest.fixture(params=SIZED, scope="module")
def starting(request):
    """Starts the same group again and again."""
    name, num_ranks = request.param
    with EVERY[name]() as found:
        yield lambda: found.start(Echo, num_ranks, arguments=(1, "two"), options={"three": 3})


@pytest.fixture(params=SIZED, scope="module")
def group(request):
    """One for all tests that leave it as it was."""
    name, num_ranks = request.param
    with EVERY[name]() as found, found.start(Echo, num_ranks, arguments=(1, "two"), options={"three": 3}) as running:
        yield running


@pytest.fixture
def fresh(starting):
    with starting() as running:
        yield running


def test_workers_are_constructed_with_their_rank_and_the_arguments(group):
    expected = [(rank, group.num_ranks, (1, "two"), {"three": 3}) for rank in range(group.num_ranks)]
    assert group.submit(range(group.num_ranks), "started_with").result(LIMIT_S) == expected
    assert group.submit(0, "started_with").result(LIMIT_S) == expected[0]


def test_pids_are_those_of_the_workers(group):
    assert tuple(group.submit(range(group.num_ranks), "pid").result(LIMIT_S)) == group.pids


def test_one_rank_by_number_gives_a_value_and_a_sequence_a_list(group):
    assert group.submit(0, "back", 5).result(LIMIT_S) == 5
    assert group.submit([0], "back", value=5).result(LIMIT_S) == [5]
    assert group.submit([0], "back").result(LIMIT_S) == [None]


def test_actions_of_a_rank_run_in_the_order_submitted(fresh):
    handles = [fresh.submit(0, "append", number) for number in range(50)]
    assert handles[-1].result(LIMIT_S) == 50, "the last may be asked for first"
    assert [handle.result(LIMIT_S) for handle in handles] == list(range(1, 51))
    assert fresh.submit(0, "read_log").result(LIMIT_S) == list(range(50))


def test_a_list_of_ranks_is_answered_in_its_order(group):
    ranks = tuple(reversed(range(group.num_ranks)))
    handle = group.submit(ranks, "started_with")
    assert [answer[0] for answer in handle.result(LIMIT_S)] == list(ranks)
    assert handle.ranks == ranks
    assert handle.method == "started_with"


def test_a_result_may_be_had_twice(fresh):
    handle = fresh.submit(0, "append", "x")
    assert handle.result(LIMIT_S) == 1
    assert handle.done
    assert handle.result(0.0) == 1


def test_large_messages_pass_both_ways(group):
    block = os.urandom(8_000_000)
    first = group.submit(0, "back", block)
    second = group.submit(0, "back", block[::-1])
    assert second.result(LIMIT_S) == block[::-1]
    assert first.result(LIMIT_S) == block


def test_an_exception_comes_back_with_its_traceback_and_the_worker_goes_on(group):
    handle = group.submit(0, "fail", "no such key")
    after = group.submit(0, "back", 1)
    with pytest.raises(WorkerError) as caught:
        handle.result(LIMIT_S)
    failure = caught.value.failure
    assert (failure.ended, failure.rank, failure.action) == (Ended.RAISED, 0, "fail")
    assert isinstance(caught.value, RunError)
    assert isinstance(caught.value.__cause__, KeyError)
    first, *_, last = failure.traceback.strip().splitlines()
    assert first.startswith("Traceback")
    assert last == "KeyError: 'no such key'"
    assert failure.traceback.count('  File "') == 1, "the worker's own frames alone"
    assert "workers.py" in failure.traceback
    assert "raise KeyError(text)" in str(caught.value)
    assert after.result(LIMIT_S) == 1
    with pytest.raises(WorkerError, match="no such key"):
        handle.result(LIMIT_S)
    assert pickle.loads(pickle.dumps(caught.value)).failure == failure


def test_an_exception_that_cannot_be_sent_is_described(group):
    with pytest.raises(WorkerError, match=r"Odd: salt and pepper"):
        group.submit(0, "fail_oddly").result(LIMIT_S)


def test_a_method_that_is_not_there(group):
    with pytest.raises(WorkerError, match="no attribute 'nothing'"):
        group.submit(0, "nothing").result(LIMIT_S)


def test_private_methods_and_foreign_ranks_are_refused(group):
    with pytest.raises(AssertionError, match="private"):
        group.submit(0, "__init__")
    with pytest.raises(AssertionError, match="ranks"):
        group.submit(group.num_ranks, "back")
    with pytest.raises(AssertionError):
        group.submit([], "back")


def test_wait_gives_those_that_are_done(group):
    handles = [group.submit(rank, "back", rank) for rank in range(group.num_ranks)]
    waiting = list(handles)
    while waiting:
        finished = group.wait(waiting, LIMIT_S)
        assert finished
        assert all(handle.done for handle in finished)
        waiting = [handle for handle in waiting if handle not in finished]
    assert [handle.result(0.0) for handle in handles] == list(range(group.num_ranks))


def test_results_stay_after_close_and_nothing_more_is_taken(fresh):
    good, bad = fresh.submit(0, "back", 3), fresh.submit(0, "fail", "late")
    assert fresh.wait([bad], LIMIT_S) == [bad]
    fresh.close()
    fresh.close()
    assert good.result(0.0) == 3
    with pytest.raises(WorkerError, match="late"):
        bad.result(0.0)
    with pytest.raises(AssertionError, match="closed"):
        fresh.submit(0, "back")


def test_close_calls_the_workers_own_close_once(launcher, tmp_path):
    group = launcher.start(Closing, 1, arguments=(str(tmp_path / "closed"),))
    group.submit(0, "back").result(LIMIT_S)
    group.close(grace_s=LIMIT_S)
    group.close()
    assert (tmp_path / "closed").read_text() == "closed 0\n"


def test_a_constructor_that_raises_fails_the_start(launcher):
    with pytest.raises(WorkerError, match="rank 0 cannot be built") as caught:
        launcher.start(Unbuildable, 1)
    assert caught.value.failure.action == "start"


@pytest.mark.parametrize("name", [_two_nodes_or_slow(name) for name in EVERY])
def test_what_a_worker_tells_is_heard_in_order_before_its_answer(name):
    heard = []
    with (
        EVERY[name](watch=Watch(heard=lambda rank, text: heard.append((rank, text)))) as launcher,
        launcher.start(Echo, 2) as group,
    ):
        for rank in range(2):
            group.submit(rank, "tell", 3).result(LIMIT_S)
            assert heard == [(each, str(text)) for each in range(rank + 1) for text in range(3)]


def test_a_signal_reaches_the_process_of_its_rank(fresh):
    last = fresh.num_ranks - 1
    fresh.submit(last, "count_signals", signal.SIGTERM).result(LIMIT_S)
    fresh.signal(last, signal.SIGTERM)
    assert fresh.submit(last, "wait_for_signal", LIMIT_S).result(LIMIT_S) == 1


@pytest.mark.parametrize(
    ("name", "num_ranks", "expected"),
    [
        _two_nodes_or_slow(("local", 2, [(0, 0), (0, 1)])),
        _two_nodes_or_slow(("elsewhere", 2, [(0, 0), (0, 1)])),
        ("two-nodes", 4, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        _slow(("ray", 2, [(0, 0), (0, 1)])),
        _slow(("ray-two", 4, [(0, 0), (0, 1), (1, 0), (1, 1)])),
    ],
)
def test_workers_know_their_node_and_their_device_of_it(name, num_ranks, expected):
    with EVERY[name]() as launcher, launcher.start(Place, num_ranks) as group:
        places = group.submit(range(num_ranks), "place").result(LIMIT_S)
    assert [(place.node, place.device) for place in places] == expected
    if not name.startswith("ray"):  # whose nodes have the address that Ray found
        assert {place.address for place in places} == {"127.0.0.1"}
    assert {place.host for place in places} == {os.uname().nodename}


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("local", 2),
        _two_nodes_or_slow(("elsewhere", 2)),
        pytest.param("two-nodes", 2, marks=pytest.mark.slow),  # `test_nothing_listens_that_was_not_asked_for` sums so
        _slow(("ray-two", 2)),
    ],
)
def test_the_store_serves_torch_distributed(name, num_ranks):
    import torch.distributed as dist

    with EVERY[name]() as launcher, launcher.start(Summing, num_ranks) as group:
        ranks = range(num_ranks)
        assert group.submit(ranks, "sum", 2).result(LIMIT_S) == [2.0 * num_ranks] * num_ranks
        group.submit(ranks, "again").result(LIMIT_S)
        assert group.submit(ranks, "sum", 3).result(LIMIT_S) == [3.0 * num_ranks] * num_ranks
        group.submit(ranks, "end").result(LIMIT_S)
    assert not dist.is_initialized()

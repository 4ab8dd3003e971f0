"""The clock of a run: what it shows and records of an action, how long it waits and on whom, and what it says then."""

from __future__ import annotations

import math
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from plait.errors import RunError
from plait.schedule.dispatch import Task
from plait.schedule.work import Done, Work
from plait.workers import clock
from plait.workers.clock import LOOK_BETWEEN_S, LOOK_S, RunClock
from plait.workers.ranks import WAIT_S
from plait.workers.recorder import Recorder
from plait.workers.status_file import StatusFile
from tests.hand_clock import HandClock


class Pool:
    """Reward functions that say what they are told to."""

    def __init__(self, links: Collection[str] | None = None, seconds: float = 0.0) -> None:
        self.told = None if links is None else (list(links), seconds)
        self.looks = 0

    def news(self) -> tuple[list[str], float] | None:
        return self.told

    def look(self) -> None:
        self.looks += 1


class Waiting:
    """A transport on which waiting takes `lasts` of the time that it may take."""

    def __init__(self, hand: HandClock, lasts: float) -> None:
        self.hand, self.lasts = hand, lasts
        self.waits: list[tuple[float, str, list[str]]] = []

    def wait(self, seconds: float, what: str, links: list[str]) -> bool:
        self.waits.append((seconds, what, links))
        self.hand.now_s += seconds * self.lasts
        return self.lasts < 1


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    return HandClock.of(clock, monkeypatch)


def clock_of(hand: HandClock, *pools: Pool, lasts: float = 0.5) -> tuple[RunClock, Waiting, list[int]]:
    """A clock, its transport, and the units that it shows."""
    transport, shown = Waiting(hand, lasts), []
    progress: Any = SimpleNamespace(advance=shown.append)
    given: Any = (transport, StatusFile(None, 0), pools, Recorder(), progress)
    return RunClock(*given), transport, shown


def task_of(name: str, *done: Done | None, mesh: Collection[int] = (0,), shares: Collection[int] = ()) -> Task:
    def work() -> Work[None]:
        yield from done

    given: Any = SimpleNamespace(name=name, role="ref", work=work(), mesh=frozenset(mesh), shares=frozenset(shares))
    return given


def test_an_action_is_shown_by_its_units_and_nothing_where_none_was_done(hand: HandClock) -> None:
    run, _, shown = clock_of(hand)
    task = task_of("ref.logprobs", Done("ref.logprobs/mb0", units=3), None)
    done = run.advance(task)
    assert done is not None
    assert (done.units, shown) == (3, [3])
    assert run.advance(task) is None
    assert shown == [3]
    with pytest.raises(StopIteration):
        run.advance(task)


def test_reward_functions_are_looked_at_between_actions_but_not_all_the_time(hand: HandClock) -> None:
    pool = Pool()
    run, _, _ = clock_of(hand, pool)
    task = task_of("ref.logprobs", Done(), Done(), Done())
    run.advance(task)
    hand.now_s += LOOK_BETWEEN_S / 2
    run.advance(task)
    assert pool.looks == 1
    hand.now_s += LOOK_BETWEEN_S
    run.advance(task)
    assert pool.looks == 2


def test_other_ranks_are_waited_for_by_name(hand: HandClock) -> None:
    run, transport, _ = clock_of(hand)
    run.advance(task_of("actor.train", Done()))
    hand.now_s += 10
    run.wait([task_of("actor.train", mesh=(0, 2)), task_of("ref.logprobs", mesh=(1,), shares=(2,))])
    run.wait([task_of("reward.score"), task_of("ref.logprobs", mesh=(1,))])
    assert [what for _, what, _ in transport.waits] == [
        "ranks 1, 2 (actor.train, ref.logprobs)",
        "rank 1 (ref.logprobs)",
    ]
    assert transport.waits[0][0] == pytest.approx(WAIT_S - 10)


def test_who_says_nothing_for_too_long_is_named(hand: HandClock) -> None:
    run, _, _ = clock_of(hand, lasts=1.0)
    run.advance(task_of("actor.train", Done()))
    with pytest.raises(RunError, match=rf"expected a sign from rank 1 \(ref.logprobs\) within {WAIT_S:g} s"):
        run.wait([task_of("ref.logprobs", mesh=(1,))])


def test_a_wait_before_any_action_has_its_time_too_however_long_the_machine_has_been_up(hand: HandClock) -> None:
    hand.now_s += 10 * WAIT_S
    run, transport, _ = clock_of(hand)
    run.wait([task_of("ref.logprobs", mesh=(1,))])
    assert transport.waits == [(WAIT_S, "rank 1 (ref.logprobs)", [])]


def test_with_reward_functions_under_way_no_wait_is_long_and_none_is_the_last(hand: HandClock) -> None:
    pool, idle = Pool(["a link"], seconds=300.0), Pool()
    run, transport, _ = clock_of(hand, pool, idle, lasts=1.0)
    hand.now_s += 2 * WAIT_S
    run.wait([task_of("reward.score")])
    pool.told = ["a link"], 0.25
    run.wait([task_of("reward.score"), task_of("ref.logprobs", mesh=(1,))])
    assert transport.waits == [
        (LOOK_S, "reward functions", ["a link"]),
        (0.25, "rank 1 (ref.logprobs)", ["a link"]),
    ]
    assert (pool.looks, idle.looks) == (2, 2)
    pool.told = [], math.inf  # it has taken in the last that it was to say, and nobody has asked for it
    run.wait([task_of("reward.score")])
    assert transport.waits[2:] == [(LOOK_S, "reward functions", [])]


def test_a_wait_that_nobody_would_end_is_our_own_fault(hand: HandClock) -> None:
    run, _, _ = clock_of(hand)
    with pytest.raises(AssertionError, match="nobody would ever go on"):
        run.wait([task_of("reward.score")])

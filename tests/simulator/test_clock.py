"""Simulated seconds under the dispatcher of a run: by hand, and schedules as tasks against the static simulator."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

import pytest
from hypothesis import given, settings

from plait.schedule.action import Action
from plait.schedule.dispatch import Dispatcher, Key, Task
from plait.schedule.generators import gpipe, one_f_one_b
from plait.schedule.schedule import Schedule, with_transfers
from plait.schedule.work import Done, Work
from plait.simulator.clock import SimulatedClock
from plait.simulator.static import simulate
from tests.schedule.workloads import workloads


class Lanes:
    """`schedule.dispatch.Program`: each lane of each rank of a schedule is a task; receives are one each."""

    def __init__(self, schedule: Schedule, seconds: dict[str, float]) -> None:
        self.clock, self.seconds, self.ended = SimulatedClock(), seconds, set[str]()
        lane = lambda a: (a.rank, a.kind.lane, a.id if a.kind.lane == "recv" else "")
        self.lanes = [list(actions) for _, actions in groupby(sorted(schedule, key=lane), lane)]

    def needs(self, key: Key) -> Collection[Key]:
        return ()

    def partners(self, key: Key) -> tuple[Key, ...]:
        return (key,)

    def mesh(self, key: Key) -> frozenset[int]:
        return frozenset({key[1]})

    def begin(self, keys: tuple[Key, ...]) -> Task:
        return Task(keys, f"lane {keys[0][1]}", self.work(self.lanes[keys[0][1]]), self.mesh(keys[0]))

    def work(self, lane: Sequence[Action]) -> Work[None]:
        for action in lane:
            while not self.ended.issuperset(action.waits):
                yield None
            done = Done(action.id, action.kind.value, lane=action.kind.lane)
            seconds = self.seconds.get(action.id, 0.0)
            yield from self.clock.take(done, action.rank, "", seconds, lambda action=action: self.ended.add(action.id))

    def run(self) -> dict[str, tuple[float, float]]:
        Dispatcher(self, self.clock, here=None).run((0, number) for number in range(len(self.lanes)))
        return {span.action: (span.start_s, span.end_s) for span in self.clock.spans}


@settings(deadline=None, max_examples=40)
@given(workloads())
def test_a_schedule_takes_under_the_dispatcher_what_the_static_simulator_says(workload):
    for rule in (gpipe, one_f_one_b):
        schedule = with_transfers(rule(workload))
        seconds = workload.duration_s()
        simulated = simulate(schedule, seconds)
        assert Lanes(schedule, seconds).run() == {s.action: (s.start_s, s.end_s) for s in simulated.spans}


class Two:
    """Rank 0 takes 2 s, rank 1 takes 1 s twice and looks at what rank 0 has made: both end at 2 s."""

    def __init__(self) -> None:
        self.clock, self.made, self.seen = SimulatedClock(), list[str](), list[tuple[float, int]]()

    def needs(self, key: Key) -> Collection[Key]:
        return ()

    def partners(self, key: Key) -> tuple[Key, ...]:
        return (key,)

    def mesh(self, key: Key) -> frozenset[int]:
        return frozenset({key[1]})

    def begin(self, keys: tuple[Key, ...]) -> Task:
        rank = keys[0][1]
        return Task(keys, f"rank {rank}", (self.zero(), self.one())[rank], frozenset({rank}))

    def zero(self) -> Work[None]:
        said = yield from self.clock.take(
            Done("long", "F"), 0, "actor", 2.0, lambda: self.made.append("long") or "ended"
        )
        assert said == "ended"

    def one(self) -> Work[None]:
        for name in ("short", "second"):
            yield from self.clock.take(Done(name, "F"), 1, "actor", 1.0, lambda: None)
            self.seen.append((self.clock.now_s, len(self.made)))


def test_ends_at_one_moment_come_as_their_actions_began():
    two = Two()
    Dispatcher(two, two.clock, here=None).run([(0, 0), (0, 1)])
    assert two.seen == [(1.0, 0), (2.0, 1)]
    assert [(s.action, s.rank, s.start_s, s.end_s, s.role) for s in two.clock.spans] == [
        ("long", 0, 0.0, 2.0, "actor"),
        ("short", 1, 0.0, 1.0, "actor"),
        ("second", 1, 1.0, 2.0, "actor"),
    ]


def test_an_action_that_nobody_waits_with_may_begin_later():
    clock = SimulatedClock()
    ended: list[float] = []
    first = clock.begin(Done("a", "MOVE"), 0, "", 1.5, lambda: ended.append(clock.now_s))
    assert clock.begin(Done("b", "MOVE"), 0, "", 0.5, lambda: ended.append(clock.now_s), after_s=first) == 2.0
    clock.wait([])
    clock.wait([])
    assert ended == [1.5, 2.0]
    with pytest.raises(AssertionError, match="nobody would ever go on"):
        clock.wait([])

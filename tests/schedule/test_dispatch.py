"""Which call goes on next, by hand and at random; calls of several steps, calls that share a task, shrinking meshes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from plait.schedule.dispatch import Dispatcher, Key, Task
from plait.schedule.work import Done, Work

Log = list[str]


@dataclass
class Calls:
    """A program by hand, and its clock: a wait is a sign for all that wait.

    meshes, needs: of each call; there: how many actions each has; waits: those that need a sign for each action;
    pairs: calls that one task runs.
    """

    meshes: Mapping[Key, set[int]]
    before: Mapping[Key, set[Key]] = field(default_factory=dict)
    actions: int = 3
    waits: Collection[Key] = ()
    pairs: Mapping[Key, tuple[Key, ...]] = field(default_factory=dict)
    log: Log = field(default_factory=list)
    signs: int = 0

    def needs(self, key: Key) -> Collection[Key]:
        return self.before.get(key, set())

    def partners(self, key: Key) -> tuple[Key, ...]:
        return self.pairs.get(key, (key,))

    def mesh(self, key: Key) -> frozenset[int]:
        return frozenset(self.meshes[key])

    def begin(self, keys: tuple[Key, ...]) -> Task:
        name = "+".join(f"{step}.{node}" for step, node in keys)
        self.log.append(f"begin {name}")
        mesh = frozenset(rank for key in keys for rank in self.meshes[key])
        task = Task(keys, name, self._nothing(), mesh)
        task.work = self.work(task)
        return task

    def work(self, task: Task) -> Work[None]:
        for number in range(self.actions):
            if not set(self.waits).isdisjoint(task.keys):
                wanted = self.signs + 1
                while self.signs < wanted:
                    yield None
            self.log.append(f"{task.name} {number}")
            yield Done(str(number))

    def _nothing(self) -> Work[None]:
        return
        yield

    def advance(self, task: Task) -> Done | None:
        return next(task.work)

    def wait(self, tasks: Sequence[Task]) -> None:
        self.log.append("wait for " + ", ".join(task.name for task in tasks))
        self.signs += 1

    def run(self, *keys: Key) -> Log:
        Dispatcher(self, self).run(keys or self.meshes)
        return self.log


def test_calls_begin_when_their_ranks_are_free_and_nobody_waits_while_one_goes_on() -> None:
    """0 and 3 on the rank that dispatches; 1 and 2 elsewhere, each action after a sign."""
    meshes = {(0, 0): {0}, (0, 1): {1}, (0, 2): {1}, (0, 3): {0}}
    before = {(0, 2): {(0, 1)}, (0, 3): {(0, 0)}}
    log = Calls(meshes, before, actions=2, waits={(0, 1), (0, 2)}).run()
    assert log[:7] == ["begin 0.0", "begin 0.1", "0.0 0", "0.0 1", "begin 0.3", "0.3 0", "0.3 1"]
    assert log[7:] == [
        *("wait for 0.1", "0.1 0", "wait for 0.1", "0.1 1"),
        *("begin 0.2", "wait for 0.2", "0.2 0", "wait for 0.2", "0.2 1"),
    ]


def test_what_others_compute_goes_on_first() -> None:
    assert Calls({(0, 0): {0}, (0, 1): {1}}, actions=1).run()[2:] == ["0.1 0", "0.0 0"]


def test_tasks_go_on_by_their_keys_whichever_began_first() -> None:
    """1 begins behind 0, when 2 is under way; nobody is on the rank that dispatches."""
    log = Calls({(0, 0): {1}, (0, 1): {1}, (0, 2): {2}}, actions=2).run()
    assert log == [
        *("begin 0.0", "begin 0.2", "0.0 0", "0.2 0", "0.0 1", "0.2 1"),
        *("begin 0.1", "0.1 0", "0.1 1"),
    ]
    log = Calls({(0, 0): {1}, (0, 1): {1}, (0, 2): {2}}, actions=3, waits={(0, 2)}).run()
    assert log.index("0.1 0") < log.index("0.2 1")


def test_a_dispatcher_on_no_rank_takes_all_in_turn() -> None:
    calls = Calls({(0, 0): {0}, (0, 1): {1}}, actions=1)
    Dispatcher(calls, calls, here=None).run(calls.meshes)
    assert calls.log[2:] == ["0.0 0", "0.1 0"]


def test_a_call_of_the_next_step_begins_beside_one_of_this_step() -> None:
    """Generation (node 0) of step 1 needs that of step 0; training (node 1) on other ranks needs its own samples."""
    meshes = {(0, 0): {0}, (0, 1): {1}, (1, 0): {0}, (1, 1): {1}}
    before = {(0, 1): {(0, 0)}, (1, 0): {(0, 0)}, (1, 1): {(1, 0), (0, 1)}}
    log = Calls(meshes, before, actions=2).run()
    assert log == [
        *("begin 0.0", "0.0 0", "0.0 1"),
        *("begin 0.1", "begin 1.0", "0.1 0", "0.1 1", "1.0 0", "1.0 1"),
        *("begin 1.1", "1.1 0", "1.1 1"),
    ]


def test_what_others_compute_is_begun_before_an_action_here() -> None:
    """A long action of the rank that dispatches (0.0) keeps nobody from what only a computation (0.1) stands before."""
    meshes: dict[Key, set[int]] = {(0, 0): {0}, (0, 1): set(), (0, 2): {1}}
    log = Calls(meshes, {(0, 2): {(0, 1)}}, actions=1).run()
    assert log == ["begin 0.0", "begin 0.1", "0.1 0", "begin 0.2", "0.2 0", "0.0 0"]


def test_partners_begin_together_when_all_of_them_may() -> None:
    meshes = {(0, 0): {0}, (0, 1): {0}, (0, 2): {0, 1}}
    pair = ((0, 1), (0, 2))
    log = Calls(meshes, {(0, 2): {(0, 0)}}, actions=1, pairs=dict.fromkeys(pair, pair)).run()
    assert log == ["begin 0.0", "0.0 0", "begin 0.1+0.2", "0.1+0.2 0"]


def test_ranks_that_a_call_releases_are_free_for_others_while_it_goes_on() -> None:
    class Shrinking(Calls):
        def work(self, task: Task) -> Work[None]:
            for number, _ in enumerate(super().work(task)):
                if number == 0 and task.keys == ((0, 0),):
                    task.release({1})
                yield Done(str(number))

    log = Shrinking({(0, 0): {0, 1}, (0, 1): {1}}).run()
    assert log == ["begin 0.0", "0.0 0", "begin 0.1", "0.1 0", "0.1 1", "0.1 2", "0.0 1", "0.0 2"]


@given(st.data())
def test_every_call_runs_once_after_what_it_needs_and_no_rank_has_two(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    keys = [(0, number) for number in range(count)]
    meshes = {key: set(data.draw(st.lists(st.integers(0, 3), max_size=3))) for key in keys}
    before = {
        key: set(data.draw(st.lists(st.sampled_from(keys[:place] or [key]), max_size=3))) - {key}
        for place, key in enumerate(keys)
    }
    waits = set(data.draw(st.lists(st.sampled_from(keys))))
    busy: dict[int, Key] = {}
    ended: list[Key] = []

    class Watched(Calls):
        def begin(self, keys: tuple[Key, ...]) -> Task:
            assert self.needs(keys[0]) <= set(ended), "it began before what it needs had ended"
            for rank in self.meshes[keys[0]]:
                assert rank not in busy, "a rank had two calls"
                busy[rank] = keys[0]
            return super().begin(keys)

        def work(self, task: Task) -> Work[None]:
            yield from super().work(task)
            for rank in task.mesh:
                del busy[rank]
            ended.append(task.keys[0])

    Watched(meshes, before, actions=2, waits=waits).run()
    assert sorted(ended) == keys

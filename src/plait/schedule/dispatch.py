"""Which work of a run goes on next: each begins as soon as what it needs is there and its ranks are free; all that are
under way go on in turns, an action at a time; and only where none of them can, the clock is waited for.

A run and its prediction are driven by this one loop: the one with the clock of processes (`workers.clock`), the other
with simulated seconds (`simulator.clock`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from plait.schedule.work import Done, Work

Key = tuple[int, int]
"""(training step of the run, id of a node of its dataflow)."""


@dataclass(eq=False)
class Task:
    """A call on its way, or several that one schedule computes together."""

    keys: tuple[Key, ...]
    name: str
    """For records and errors."""
    work: Work[Any] = field(repr=False)
    mesh: frozenset[int]
    """Ranks that it keeps busy; without them others may begin beside it. It gets smaller while the task runs, where
    ranks have nothing left to do for it."""
    role: str = ""
    """For records."""
    shares: frozenset[int] = frozenset()
    """Ranks that compute for it beside others: it is waited for, but keeps nobody from them."""
    beside: Sequence[Task] = field(default=(), repr=False)
    """All that are under way, itself included."""
    told: dict[frozenset[int], float] = field(default_factory=dict, repr=False)
    """Work of it that these ranks together have been told of, and have not ended."""
    result: Any = field(default=None, repr=False)
    """What its work has returned, when that has ended."""

    def waits_for(self, ranks: frozenset[int]) -> float:
        """Work of all calls that these ranks together have been told of, and have not ended."""
        return sum(task.told.get(ranks, 0.0) for task in self.beside)

    def tell(self, ranks: frozenset[int], work: float) -> None:
        """They have been told of so much more, or, below 0, have ended it."""
        left = self.told.pop(ranks, 0.0) + work
        if left > 1e-9:
            self.told[ranks] = left

    def take(self, ranks: Collection[int]) -> bool:
        """Keep further ranks busy, if no other task does; whether it does now."""
        if any(not other.mesh.isdisjoint(ranks) for other in self.beside if other is not self):
            return False
        self.mesh, self.shares = self.mesh | frozenset(ranks), self.shares - frozenset(ranks)
        return True

    def follows(self, key: Key, ranks: frozenset[int]) -> bool:
        """Whether that call alone keeps these ranks busy, so that they may be told what comes behind it. They compute
        for this one, then, too, and nobody else is kept from them."""
        busy = [other for other in self.beside if not (other.mesh | other.shares).isdisjoint(ranks)]
        if len(busy) != 1 or busy[0].keys != (key,):
            return False
        self.shares |= ranks
        return True

    def release(self, ranks: Collection[int] | None = None) -> None:
        """These ranks (all of them) have nothing left to do for it."""
        gone = self.mesh | self.shares if ranks is None else frozenset(ranks)
        self.mesh, self.shares = self.mesh - gone, self.shares - gone

    def share(self, ranks: Collection[int]) -> None:
        """They go on computing for it, but no longer keep others from them."""
        kept = self.mesh & frozenset(ranks)
        self.mesh, self.shares = self.mesh - kept, self.shares | kept


class Program(Protocol):
    """What is to be run."""

    def needs(self, key: Key) -> Collection[Key]:
        """Those that must have ended before it may begin; fewer, perhaps, when others have got so far that it may run
        beside them."""
        ...

    def partners(self, key: Key) -> tuple[Key, ...]:
        """All that one schedule computes together with it, itself included."""
        ...

    def mesh(self, key: Key) -> frozenset[int]:
        """The ranks that it needs to begin."""
        ...

    def begin(self, keys: tuple[Key, ...]) -> Task:
        """Make the task of these partners; it says which ranks it keeps busy from then on."""
        ...


class Clock(Protocol):
    """Where time passes."""

    def advance(self, task: Task) -> Done | None:
        """One action of a task, recorded; None where it cannot go on by now. Raises StopIteration at its end."""
        ...

    def wait(self, tasks: Sequence[Task]) -> None:
        """Until something has come that may let one of these tasks go on."""
        ...


class Dispatcher:
    """Runs the calls of one or several steps.

    Args:
        here: the rank that dispatches, None if none of them does. It computes an action when what only others compute
            has nothing to say: that takes no time here, and what begins then keeps them from waiting. Else tasks go on
            by their keys, whichever began first.
    """

    def __init__(self, program: Program, clock: Clock, *, here: int | None = 0) -> None:
        self._program = program
        self._clock = clock
        self._here = here
        self._waiting: list[Key] = []
        self._tasks: list[Task] = []

    def add(self, keys: Iterable[Key]) -> None:
        """Further calls, in the order in which they begin where they could begin at the same time."""
        self._waiting += keys

    def run(self) -> None:
        """To the end of all calls. Raises what a call raises."""
        while self._waiting or self._tasks:
            self._begin_ready()
            if not self._round(here=False) and not self._round(here=True):
                self._clock.wait(self._tasks)

    def _round(self, *, here: bool) -> bool:
        """An action of each task that is computed here, or of each other one; whether one of them went on."""
        tasks = [task for task in self._tasks if (self._here in task.mesh) == here]
        tasks.sort(key=_keys)
        went_on = [self._go_on(task) for task in tasks]
        return any(went_on)

    def _begin_ready(self) -> None:
        if not self._waiting:
            return
        program, left = self._program, {*self._waiting, *(key for task in self._tasks for key in task.keys)}
        busy = frozenset[int]().union(*[task.mesh for task in self._tasks])
        begun: set[Key] = set()
        for key in list(self._waiting):
            if key in begun:  # with a partner
                continue
            keys = program.partners(key)
            for partner in keys:
                if not left.intersection(program.needs(partner)).issubset(keys):
                    break
            else:
                mesh = frozenset[int]().union(*map(program.mesh, keys))
                if not mesh.isdisjoint(busy):
                    continue
                task = program.begin(keys)
                begun.update(keys)
                self._waiting = [other for other in self._waiting if other not in keys]
                self._tasks.append(task)
                task.beside = self._tasks
                busy |= mesh | task.mesh

    def _go_on(self, task: Task) -> bool:
        try:
            return self._clock.advance(task) is not None
        except StopIteration as end:
            task.result = end.value
            self._tasks.remove(task)
            return True


def _keys(task: Task) -> tuple[Key, ...]:
    return task.keys


@dataclass
class _Alone:
    """`Program` of one task."""

    task: Task

    def needs(self, key: Key) -> Collection[Key]:
        return ()

    def partners(self, key: Key) -> tuple[Key, ...]:
        return (key,)

    def mesh(self, key: Key) -> frozenset[int]:
        return self.task.mesh

    def begin(self, keys: tuple[Key, ...]) -> Task:
        return self.task


def run_alone(task: Task, clock: Clock) -> Any:
    """To the end of a task beside which nothing else is to be done; the result of its work. Raises what that raises."""
    dispatcher = Dispatcher(_Alone(task), clock)
    dispatcher.add(task.keys)
    dispatcher.run()
    return task.result

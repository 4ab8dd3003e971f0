"""Decides which call of a run goes on next.

A call begins as soon as the calls that it needs have ended and its ranks are free. All calls under way go on in turns,
an action at a time. If none of them can go on, the dispatcher waits for the clock. This one loop drives a run, with the
clock of processes (`workers.clock`), and its prediction, with simulated seconds (`simulator.clock`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from plait.schedule.work import Done, Work

Key = tuple[int, int]
"""(training step of the run, id of a node of its dataflow)."""


@dataclass(eq=False)
class Task:
    """A call under way, or several calls that one schedule computes together."""

    keys: tuple[Key, ...]
    name: str
    """For records and errors."""
    work: Work[Any] = field(repr=False)
    mesh: frozenset[int]
    """Ranks that it keeps busy: no other call may begin on them. Ranks leave it when they have nothing left to do for
    the task."""
    role: str = ""
    """For records."""
    shares: frozenset[int] = frozenset()
    """Ranks that compute for it and for other tasks: other calls may begin on them."""
    beside: Sequence[Task] = field(default=(), repr=False)
    """All tasks under way, this one included."""
    told: dict[frozenset[int], float] = field(default_factory=dict, repr=False)
    """Ranks that work together → how much work of this task they have been given and have not finished, in full parts
    (`runtime.steps.free_copies`)."""
    result: Any = field(default=None, repr=False)
    """What its work returned; None until that has ended."""

    def waits_for(self, ranks: frozenset[int]) -> float:
        """How much work of all tasks these ranks have been given and have not finished, in full parts."""
        return sum(task.told.get(ranks, 0.0) for task in self.beside)

    def tell(self, ranks: frozenset[int], work: float) -> None:
        """These ranks have been given this much more work; below 0, they have finished it."""
        left = self.told.pop(ranks, 0.0) + work
        if left > 1e-9:
            self.told[ranks] = left

    def take(self, ranks: Collection[int]) -> bool:
        """Add these ranks to the mesh, if no other task has one of them in its mesh; whether it did."""
        if any(not other.mesh.isdisjoint(ranks) for other in self.beside if other is not self):
            return False
        self.mesh, self.shares = self.mesh | frozenset(ranks), self.shares - frozenset(ranks)
        return True

    def follows(self, key: Key, ranks: frozenset[int]) -> bool:
        """Whether the call `key` alone uses these ranks, so that they can be told now what to do for this task after
        it. If so, this task shares them."""
        busy = [other for other in self.beside if not (other.mesh | other.shares).isdisjoint(ranks)]
        if len(busy) != 1 or busy[0].keys != (key,):
            return False
        self.shares |= ranks
        return True

    def release(self, ranks: Collection[int] | None = None) -> None:
        """These ranks have nothing left to do for the task; None: all of its ranks."""
        gone = self.mesh | self.shares if ranks is None else frozenset(ranks)
        self.mesh, self.shares = self.mesh - gone, self.shares - gone

    def share(self, ranks: Collection[int]) -> None:
        """These ranks go on computing for the task, but other calls may begin on them."""
        kept = self.mesh & frozenset(ranks)
        self.mesh, self.shares = self.mesh - kept, self.shares | kept


class Program(Protocol):
    """What is to be run."""

    def needs(self, key: Key) -> Collection[Key]:
        """The calls that must have ended before this one may begin. The set may shrink while other calls run."""
        ...

    def partners(self, key: Key) -> tuple[Key, ...]:
        """All calls that one schedule computes together with this one, itself included."""
        ...

    def mesh(self, key: Key) -> frozenset[int]:
        """The ranks that must be free for the call to begin."""
        ...

    def begin(self, keys: tuple[Key, ...]) -> Task:
        """Begin these partners as one task; its `mesh` says which ranks it keeps busy from then on."""
        ...


class Clock(Protocol):
    """Where time passes."""

    def advance(self, task: Task) -> Done | None:
        """Do one action of a task and record it; None: it cannot go on yet. Raises StopIteration at its end."""
        ...

    def wait(self, tasks: Sequence[Task]) -> None:
        """Wait until one of these tasks may be able to go on."""
        ...


class Dispatcher:
    """Runs calls, of one step or of several.

    Args:
        here: the rank that dispatches; None: none does. Tasks that it computes go on only if no other task can: to
            advance the others takes no time here, and the calls that begin then keep their ranks busy. Within both
            kinds tasks go on in the order of their keys, whichever began first.
    """

    def __init__(self, program: Program, clock: Clock, *, here: int | None = 0) -> None:
        self._program = program
        self._clock = clock
        self._here = here
        self._waiting: list[Key] = []
        self._tasks: list[Task] = []
        """In the order of their keys."""
        self._left: set[Key] = set()
        """Calls that wait, and those under way."""

    def run(self, keys: Iterable[Key]) -> None:
        """Run these calls to their end; of those that could begin at the same time, the earlier ones begin first.
        Raises what a call raises."""
        self._waiting += keys
        self._left.update(self._waiting)
        while self._waiting or self._tasks:
            self._begin_ready()
            if not self._round(here=False) and not self._round(here=True):
                self._clock.wait(self._tasks)

    def _round(self, *, here: bool) -> bool:
        """Do an action of each task that this rank computes (`here`), or of each other task; whether one went on."""
        went_on = False
        for task in [task for task in self._tasks if (self._here in task.mesh) == here]:
            went_on = self._go_on(task) or went_on
        return went_on

    def _begin_ready(self) -> None:
        if not self._waiting:
            return
        program, left = self._program, self._left
        busy: frozenset[int] | None = None
        begun: set[Key] = set()
        for key in self._waiting:
            if key in begun:  # with a partner
                continue
            keys = program.partners(key)
            for partner in keys:
                needs = program.needs(partner)
                if not left.isdisjoint(needs) and not left.intersection(needs).issubset(keys):
                    break
            else:
                mesh = frozenset[int]().union(*map(program.mesh, keys))
                if busy is None:
                    busy = frozenset[int]().union(*[task.mesh for task in self._tasks])
                if not mesh.isdisjoint(busy):
                    continue
                task = program.begin(keys)
                begun.update(keys)
                insort(self._tasks, task, key=attrgetter("keys"))
                task.beside = self._tasks
                busy |= mesh | task.mesh
        if begun:
            self._waiting = [key for key in self._waiting if key not in begun]

    def _go_on(self, task: Task) -> bool:
        try:
            return self._clock.advance(task) is not None
        except StopIteration as end:
            task.result = end.value
            self._tasks.remove(task)
            self._left.difference_update(task.keys)
            return True


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
    """Run one task to its end; the result of its work. Raises what the work raises."""
    Dispatcher(_Alone(task), clock).run(task.keys)
    return task.result

"""One worker of a reward pool, and the calls that it was given and has not answered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from plait.rewards.group import Call
from plait.rewards.process import RewardProcess
from plait.rewards.worker import AT_IMPORT


@dataclass
class Sent:
    """A call that was given to a worker."""

    call: Call
    beside: int
    """See `Worked.beside`."""
    deadline: float
    began_s: float = field(default_factory=time.perf_counter)
    """When it was, on the clock that all processes of a machine share."""


@dataclass
class Worker:
    process: RewardProcess
    place: int
    """Which of the pool's workers it is."""
    import_deadline: float
    ready: bool = False
    sent: dict[int, Sent] = field(default_factory=dict)
    """Number of a call, which its answer has too → the call."""
    beside: bool = False
    """Whether further calls may be given to it while these are under way."""

    @property
    def deadline(self) -> float:
        """When the first of its calls has passed its limit, or its import has."""
        if not self.ready:
            return self.import_deadline
        return min((sent.deadline for sent in self.sent.values()), default=inf)

    @property
    def busy(self) -> bool:
        """Whether something is awaited of it: an answer, or that it has loaded the functions."""
        return bool(self.sent) or not self.ready

    @property
    def free_number(self) -> int:
        """The first number that none of its calls has."""
        taken = {sent.beside for sent in self.sent.values()}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    @property
    def calls(self) -> list[Call]:
        return [sent.call for sent in self.sent.values()]

    def may_take(self, call: Call, awaits: Sequence[bool]) -> bool:
        """Whether it may be given a call beside those that it has."""
        return not self.sent or (awaits[call.function] and not call.by_itself)

    def is_answer(self, pid: object, call: object) -> bool:
        """Whether it is of this process, to what it was given."""
        return pid == self.process.pid and (call in self.sent if self.ready else call == AT_IMPORT)


def next_given(
    workers: Iterable[Worker], calls: Iterable[Call], awaits: Sequence[bool], max_concurrency: int
) -> tuple[Worker, Call] | None:
    """Which worker is given which of the calls that wait: the first that it may take, to the one that has the fewest.
    What has to have a worker for itself stays among the first calls until one comes to rest for it. None: none is.

    Args:
        awaits: by function, whether its calls may be under way together.
        max_concurrency: how many of a worker may be.
    """
    first = list(islice(calls, 2 * max_concurrency))
    free = (
        [w for w in workers if w.ready and len(w.sent) < (max_concurrency if w.beside or not w.sent else 1)]
        if first
        else ()
    )
    by_load = sorted(free, key=lambda worker: len(worker.sent))
    return next(((worker, call) for worker in by_load for call in first if worker.may_take(call, awaits)), None)

"""The reward pool: groups of samples go to worker processes, scores come back; nothing that fails is silent.

A call is one function over one group. A call that fails as a whole (it raises, passes its time limit, kills its
worker, returns a wrong count) is made again for each sample alone, which finds the culprit, then for the others
together, which it may compare; a score that is no number names its sample at once. An answer counts if it is of the
call that its worker was given, and of that process: what a forked child brings back is an error that names the
function. Of coroutine functions a worker has several calls under way at a time; where it ends with more than one, none
is blamed, and each is made again by itself. The pool has no thread: it moves on inside `poll` and `wait`.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from plait.data.records import Sample
from plait.errors import ConfigError, PlaitError, RunError
from plait.rewards.calls import missing_arguments
from plait.rewards.functions import RewardFunction, main_file
from plait.rewards.group import Call, Group, packed_call
from plait.rewards.process import RewardProcess
from plait.rewards.scores import FailureKind, GroupScores, Worked
from plait.rewards.settings import OnError
from plait.rewards.signature import Signature, signature_from
from plait.rewards.words import STRANGE
from plait.rewards.worker import AT_IMPORT, BESIDE, IN_WORKER
from plait.rewards.working import Sent, Worker, next_given
from plait.user_code import IMPORT_LIMIT_S

_TICK_S = 0.2
"""Longest sleep before workers are looked after again."""
_LOST_SENDS = 3


class RewardPool:
    """Runs reward functions over groups of samples in worker processes.

    Args:
        functions: see `functions.reward_functions`; of one kind.
        timeout_s: wall-clock limit of a call.
        workers: number of processes.
        at_once: calls of a coroutine function that each has under way at a time.
        on_error: STOP raises RunError; DROP leaves the sample without a reward (NaN), counted.
        seed: of random numbers that functions draw from `random` and `numpy.random`.
        output: file to which the functions' own prints are appended; by default they go to stderr.
        memory_gb: most data of a worker, on Linux (`worker.bound_memory`); None: no limit.

    Whatever looks after the workers (`start`, `submit`, `look`, `poll`, `wait`) raises ConfigError where a function
    cannot be loaded, and under STOP RunError where one has failed or a child that it forked came back.

    Raises:
        ConfigError: `memory_gb` is given, and this is no Linux.
        RunError: it is made in a reward worker.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        timeout_s: float = 30.0,
        workers: int = 1,
        at_once: int = 1,
        on_error: OnError | str = OnError.STOP,
        seed: int = 0,
        output: Path | None = None,
        memory_gb: float | None = None,
    ) -> None:
        assert functions, "a pool needs a function"
        assert timeout_s > 0, f"timeout_s must be positive, got {timeout_s}"
        assert min(workers, at_once) >= 1, f"workers and at_once must be at least 1, got {workers} and {at_once}"
        if os.environ.get(IN_WORKER):
            raise RunError(
                "a reward worker has imported a file that starts a run when it is imported; "
                "put that part under `if __name__ == '__main__':`"
            )
        if memory_gb is not None and sys.platform != "linux":
            raise ConfigError(f"`{functions[0].kind.section}.memory_gb` works on Linux only; remove it")
        self.functions = tuple(functions)
        self._kind = functions[0].kind
        self.timeout_s, self._at_once = timeout_s, at_once
        self.on_error = OnError(on_error)
        self._seed = seed
        self._output = output
        self._memory_bytes = None if memory_gb is None else round(memory_gb * 1e9)
        targets = [(function.name, function.target) for function in functions]
        self._start_message = pickle.dumps({"functions": targets, "main_file": main_file(), "argv": sys.argv})
        self._calls: deque[Call] = deque()
        self._groups: dict[int, Group] = {}
        self._finished: list[GroupScores] = []
        self._num_submitted = 0
        self._num_sent = 0
        self._come_back: set[int] = set()
        """Functions of which a forked child came back, to be told with the next scores."""
        self._told: set[int] = set()
        self.looked: Callable[[], None] = lambda: None
        """Called whenever the workers have been looked after: while it waits, several times a second."""
        self._signatures: list[Signature] | None = None
        self._workers: list[Worker] = []
        try:
            for place in range(workers):
                self._workers.append(self._spawn(place))
        except BaseException:
            self.close()
            raise

    # -- life

    def start(self, columns: Sequence[str] | None = None) -> None:
        """Wait until the functions are loaded, and check that the data have every column that they need.

        Raises:
            ConfigError: a function needs a column that is not among `columns`.
        """
        while self._signatures is None:
            self._pump(_TICK_S)
        for function, signature in zip(self.functions, self._signatures, strict=True):
            if columns is not None and (problem := missing_arguments(function, signature, columns)):
                raise ConfigError(problem)

    def close(self) -> None:
        """Kill the workers and what they started; wait until they are gone. Harmless when done before."""
        for worker in self._workers:
            worker.process.kill()
        self._workers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, samples: Sequence[Sample]) -> int:
        """Hand in all samples of one prompt. Returns the ticket that their scores will carry. Never blocks for long."""
        assert self._workers, "the pool is closed"
        assert samples, "a group has at least one sample"
        assert len({sample.prompt.uid for sample in samples}) == 1, "a group is the samples of one prompt instance"
        ticket = self._num_submitted
        self._num_submitted += 1
        self._groups[ticket] = group = Group(ticket, samples, self.functions)
        self._calls.extend(group.calls())
        self._after(group)  # perhaps there is nothing to ask
        self._dispatch()
        return ticket

    @property
    def num_outstanding(self) -> int:
        """Groups handed in whose scores have not been given out."""
        return len(self._groups) + len(self._finished)

    def look(self) -> None:
        """Take in what workers have said, for a later `poll`; and give them further work."""
        if self._groups:
            self._pump(0.0)

    def poll(self) -> list[GroupScores]:
        """Scores of the groups that have become done, without waiting."""
        assert self._workers, "the pool is closed"
        self._pump(0.0)
        finished, self._finished = self._finished, []
        return finished

    def news(self) -> tuple[list[Connection], float] | None:
        """What to wait on before the next `look`, and how many seconds at most; None where nothing is outstanding.
        Scores that a look has taken in end no wait: they may be for later."""
        busy = self._busy
        left_s = min((worker.deadline for worker in busy), default=inf) - time.monotonic()
        return ([worker.process.connection for worker in busy], max(0.0, left_s)) if busy or self._finished else None

    def wait(self) -> list[GroupScores]:
        """Scores of every outstanding group, in the order of their tickets. The time limits of the calls bound it."""
        while self._groups:
            self._pump(_TICK_S)
        return sorted(self.poll(), key=lambda scores: scores.ticket)

    def score(self, samples: Sequence[Sample]) -> list[GroupScores]:
        """Submit samples, grouped by prompt instance in order of first appearance, and wait for all scores."""
        assert self.num_outstanding == 0, "score() is for a pool with nothing outstanding"
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt.uid, []).append(sample)
        for group in groups.values():
            self.submit(group)
        return self.wait()

    @property
    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.busy]

    def _spawn(self, place: int) -> Worker:
        process = RewardProcess(self._start_message, self._output, self._memory_bytes)
        return Worker(process, place, time.monotonic() + IMPORT_LIMIT_S)

    def _pump(self, timeout_s: float) -> None:
        """Take what workers have sent, end those that are dead or too slow, give work to those that are free."""
        self._dispatch()
        self.looked()
        self._look_for_strays()
        if not (busy := self._busy):
            return
        left_s = min(worker.deadline for worker in busy) - time.monotonic()
        waited = connection.wait([worker.process.connection for worker in busy], max(0.0, min(timeout_s, left_s)))
        now = time.monotonic()
        for worker in busy:
            if worker.process.connection in waited:
                self._receive(worker)
            elif worker.process.exited:
                self._died(worker)
            elif now > worker.deadline:
                self._expired(worker)
        self._dispatch()

    def _dispatch(self) -> None:
        awaits = [signature.awaits and self._at_once > 1 for signature in self._signatures or ()]
        while (given := next_given(self._workers, self._calls, awaits, self._at_once)) is not None:
            worker, call = given
            self._calls.remove(call)
            self._send(worker, call, beside=awaits[call.function] and not call.by_itself)

    def _send(self, worker: Worker, call: Call, *, beside: bool) -> None:
        self._num_sent += 1
        data = packed_call(call, self.functions[call.function].name, number=self._num_sent, seed=self._seed)
        worker.sent[self._num_sent] = Sent(call, worker.free_number, time.monotonic() + self.timeout_s)
        worker.beside = beside
        try:
            worker.process.connection.send_bytes(BESIDE + data if beside else data)
        except ConnectionError:
            self._lost(worker)

    def _receive(self, worker: Worker) -> None:
        try:
            reply = worker.process.receive()
        except ConnectionResetError:
            self._lost(worker)  # the other end was closed before it had read what was sent: it had not begun the call
            return
        except ValueError:
            self._answered_by_a_stranger(worker)
            return
        except (EOFError, OSError):
            self._died(worker)
            return
        self._look_for_strays()
        if not worker.is_answer(reply.get("pid"), reply.get("call")):
            self._answered_by_a_stranger(worker)
            return
        if "unloadable" in reply:
            raise self._unloadable(f"{self._kind.noun} `{reply['unloadable']}`: {reply['error']}", reply["frames"])
        if "ready" in reply:
            worker.ready, self._signatures = True, [signature_from(entry) for entry in reply["ready"]]
            return
        sent = worker.sent.pop(reply["call"])
        call = sent.call
        self._worked(worker, sent, reply["began_s"], reply["seconds"])
        if reply["seconds"] > self.timeout_s and worker.sent:
            self._by_themselves([call])
        elif reply["seconds"] > self.timeout_s:
            # It came back before it was looked at; counted alike, or scores would depend on when that is.
            self._failed(call, FailureKind.TIMEOUT, f"took {reply['seconds']:.1f} s, the limit is {self._limit}", "")
        elif "error" in reply:
            kind = FailureKind.MISCOUNTED if reply.get("miscounted") else FailureKind.RAISED
            self._failed(call, kind, reply["error"], reply.get("traceback", ""))
        else:
            self._after(call.group, call.group.scored(call, reply))

    def _worked(self, worker: Worker, sent: Sent, began_s: float, seconds: float) -> None:
        name = self.functions[sent.call.function].name
        sent.call.group.worked.append(Worked(name, worker.place, began_s, began_s + seconds, sent.beside))

    def _unloadable(self, message: str, frames: str = "") -> PlaitError:
        """The user's to mend before a run starts; in one that has started a file has changed, or what it needs."""
        error = ConfigError(message) if self._signatures is None else RunError(message)
        error.frames = frames
        return error

    def _look_for_strays(self) -> None:
        """Children that functions forked and that came back from them: they were ended, and gave no score."""
        for worker in self._workers:
            for place in worker.process.strays():
                if place == AT_IMPORT:
                    raise self._unloadable(self._kind.forked(f"a file of the {self._names}"))
                if place >= len(self.functions):
                    continue  # something else wrote to the pipe
                if self.on_error is OnError.STOP:
                    raise RunError(self._forked(place) + self._kind.way_out)
                self._come_back.add(place)

    def _answered_by_a_stranger(self, worker: Worker) -> None:
        """Something wrote to the worker's connection that is not the worker's answer to its call."""
        if not worker.ready:
            raise self._unloadable(f"a file of the {self._names} {STRANGE}")
        self._replace(worker)
        self._blame(worker.calls, FailureKind.DIED, STRANGE, "")

    @property
    def _names(self) -> str:
        return f"{self._kind.plural} {', '.join(f'`{function.name}`' for function in self.functions)}"

    @property
    def _limit(self) -> str:
        return self._kind.limit(self.timeout_s)

    def _forked(self, place: int) -> str:
        return self._kind.forked(f"{self._kind.noun} `{self.functions[place].name}`")

    def _expired(self, worker: Worker) -> None:
        stack = worker.process.where()
        if not worker.ready:
            raise self._unloadable(f"importing the {self._names} took more than {IMPORT_LIMIT_S:.0f} s", stack)
        self._ended(worker, FailureKind.TIMEOUT, f"passed the time limit of {self._limit} and was killed at:", stack)

    def _died(self, worker: Worker) -> None:
        cause, stack = worker.process.cause_of_death()
        if not worker.ready:
            raise self._unloadable(f"one of the {self._names} {cause} while its file was imported", stack)
        self._ended(worker, FailureKind.DIED, cause, stack)

    def _ended(self, worker: Worker, kind: FailureKind, message: str, stack: str) -> None:
        """A worker ends with its calls; another takes its place."""
        for sent in worker.sent.values():
            self._worked(worker, sent, sent.began_s, time.perf_counter() - sent.began_s)
        self._replace(worker)
        self._blame(worker.calls, kind, message, stack)

    def _blame(self, calls: Sequence[Call], kind: FailureKind, message: str, stack: str) -> None:
        """A call has failed, if it was alone; of several nobody knows which it was."""
        if len(calls) > 1:
            self._by_themselves(calls)
        for call in calls if len(calls) == 1 else ():
            self._failed(call, kind, message, stack)

    def _by_themselves(self, calls: Sequence[Call]) -> None:
        """Make these calls again, with no other beside them."""
        for call in reversed(calls):
            call.by_itself = True
            self._calls.appendleft(call)

    def _lost(self, worker: Worker) -> None:
        """The worker had died while it was idle, which is not its calls' doing: give them to a fresh one."""
        for call in worker.calls:
            call.lost += 1
        if not worker.sent or max(call.lost for call in worker.calls) >= _LOST_SENDS:
            self._died(worker)
            return
        self._calls.extendleft(reversed(worker.calls))
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        self._look_for_strays()  # what it left behind ends with it
        worker.process.kill()
        self._workers[worker.place] = self._spawn(worker.place)

    def _failed(self, call: Call, kind: FailureKind, message: str, trace: str) -> None:
        self._after(call.group, call.group.failed(call, kind, message, trace))

    def _after(self, group: Group, calls: Sequence[Call] = ()) -> None:
        self._calls.extendleft(reversed(calls))
        if group.failures and self.on_error is OnError.STOP:
            raise RunError(f"{group.failures[0]}{self._kind.way_out}")
        if group.done:
            del self._groups[group.ticket]
            strays = sorted(self._come_back - self._told)
            self._told |= self._come_back
            remarks = tuple(map(self._forked, strays))
            result = group.result()
            self._finished.append(replace(result, recovered=(*result.recovered, *remarks)))

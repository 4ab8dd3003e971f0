"""Worker processes that make the calls of a pool, and what becomes of each call.

An answer counts if it is of the call that its worker was given, and of that process: what a forked child brings back is
an error that names the function. A worker runs several calls of coroutine functions at a time. If it dies during more
than one, none of them is blamed, and each is made again with a worker of its own.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Sequence
from math import inf
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path

from plait.errors import ConfigError, PlaitError, RunError
from plait.rewards.function_kinds import STRANGE
from plait.rewards.functions import RewardFunction, main_file
from plait.rewards.group import Call, packed_call
from plait.rewards.pool_worker import Sent, Worker, next_given
from plait.rewards.process import RewardProcess
from plait.rewards.scores import FailureKind, Worked
from plait.rewards.settings import RewardSettings, TurnSettings
from plait.rewards.signature import Signature, signature_from
from plait.rewards.submitted import Submitted
from plait.rewards.worker import AT_IMPORT, CONCURRENT
from plait.user_code import IMPORT_LIMIT_S

_LOST_SENDS = 3


class CallWorkers:
    """They import the functions; then each makes one call after another, or several beside one another.

    Args:
        submitted: has the calls to be made, and is told what came of them.
        settings, seed, output: see `pool.RewardPool`.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        submitted: Submitted,
        settings: RewardSettings | TurnSettings,
        *,
        seed: int,
        output: Path | None,
    ) -> None:
        self._functions = tuple(functions)
        self._kind = functions[0].kind
        self._submitted = submitted
        self._settings, self._seed, self._output = settings, seed, output
        targets = [(function.name, function.target) for function in functions]
        self._start_message = pickle.dumps({"functions": targets, "main_file": main_file(), "argv": sys.argv})
        self._num_sent = 0
        self.signatures: list[Signature] | None = None
        """How to call the functions; None: no worker has loaded them yet."""
        self._workers: list[Worker] = []
        try:
            for place in range(settings.workers):
                self._workers.append(self._spawn(place))
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._workers

    def close(self) -> None:
        """Kill the workers and what they started; wait until they are gone. Harmless when done before."""
        for worker in self._workers:
            worker.process.kill()
        self._workers = []

    def awaited(self) -> tuple[list[Connection], float]:
        """The connections of the workers of which something is awaited, and how many seconds they have at most."""
        busy = self._busy
        left_s = min((worker.deadline for worker in busy), default=inf) - time.monotonic()
        return [worker.process.connection for worker in busy], max(0.0, left_s)

    def pump(self, timeout_s: float) -> None:
        """Take what workers have sent, end those that are dead or too slow, give work to those that are free.

        Args:
            timeout_s: how long to wait at most for something to be sent.

        Raises:
            ConfigError: a function cannot be loaded.
            RunError: a call failed, or a child that it forked came back, and failures stop the run.
        """
        self.dispatch()
        self._look_for_strays()
        if not (busy := self._busy):
            return
        connections, left_s = self.awaited()
        waited = connection.wait(connections, min(timeout_s, left_s))
        now = time.monotonic()
        for worker in busy:
            if worker.process.connection in waited:
                self._receive(worker)
            elif worker.process.exited:
                self._died(worker)
            elif now > worker.deadline:
                self._expired(worker)
        self.dispatch()

    def dispatch(self) -> None:
        """Give work to the workers that are free. Raises as `pump`."""
        awaits = [signature.awaits and self._settings.max_concurrency > 1 for signature in self.signatures or ()]
        calls = self._submitted.calls
        while (given := next_given(self._workers, calls, awaits, self._settings.max_concurrency)) is not None:
            worker, call = given
            calls.remove(call)
            self._send(worker, call, beside=awaits[call.function] and not call.by_itself)

    @property
    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.busy]

    def _spawn(self, place: int) -> Worker:
        process = RewardProcess(self._start_message, self._output, self._settings.memory_bytes)
        return Worker(process, place, time.monotonic() + IMPORT_LIMIT_S)

    def _send(self, worker: Worker, call: Call, *, beside: bool) -> None:
        self._num_sent += 1
        data = packed_call(call, self._functions[call.function].name, number=self._num_sent, seed=self._seed)
        worker.sent[self._num_sent] = Sent(call, worker.free_number, time.monotonic() + self._settings.timeout_s)
        worker.beside = beside
        try:
            worker.process.connection.send_bytes(CONCURRENT + data if beside else data)
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
            worker.ready, self.signatures = True, [signature_from(entry) for entry in reply["ready"]]
            return
        sent = worker.sent.pop(reply["call"])
        call = sent.call
        self._worked(worker, sent, reply["began_s"], reply["seconds"])
        if reply["seconds"] > self._settings.timeout_s and worker.sent:
            self._submitted.make_by_themselves([call])
        elif reply["seconds"] > self._settings.timeout_s:
            # It came back before it was looked at; counted alike, or scores would depend on when that is.
            message = f"took {reply['seconds']:.1f} s, the limit is {self._limit}"
            self._submitted.failed(call, FailureKind.TIMEOUT, message, "")
        elif "error" in reply:
            kind = FailureKind.MISCOUNTED if reply.get("miscounted") else FailureKind.RAISED
            self._submitted.failed(call, kind, reply["error"], reply.get("traceback", ""))
        else:
            self._submitted.scored(call, reply)

    def _worked(self, worker: Worker, sent: Sent, began_s: float, seconds: float) -> None:
        name = self._functions[sent.call.function].name
        sent.call.group.worked.append(Worked(name, worker.place, began_s, began_s + seconds, sent.beside))

    def _unloadable(self, message: str, frames: str = "") -> PlaitError:
        """The user's to mend before a run starts; in one that has started a file has changed, or what it needs."""
        error = ConfigError(message) if self.signatures is None else RunError(message)
        error.frames = frames
        return error

    def _look_for_strays(self) -> None:
        """Children that functions forked and that came back from them: they were ended, and gave no score."""
        for worker in self._workers:
            for place in worker.process.strays():
                if place == AT_IMPORT:
                    raise self._unloadable(self._kind.forked(f"a file of the {self._names}"))
                if place < len(self._functions):  # else something else wrote to the pipe
                    self._submitted.forked(place)

    def _answered_by_a_stranger(self, worker: Worker) -> None:
        """Something wrote to the worker's connection that is not the worker's answer to its call."""
        if not worker.ready:
            raise self._unloadable(f"a file of the {self._names} {STRANGE}")
        self._replace(worker)
        self._blame(worker.calls, FailureKind.DIED, STRANGE, "")

    @property
    def _names(self) -> str:
        return f"{self._kind.plural} {', '.join(f'`{function.name}`' for function in self._functions)}"

    @property
    def _limit(self) -> str:
        return self._kind.limit(self._settings.timeout_s)

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
            self._submitted.make_by_themselves(calls)
        for call in calls if len(calls) == 1 else ():
            self._submitted.failed(call, kind, message, stack)

    def _lost(self, worker: Worker) -> None:
        """The worker had died while it was idle, which is not its calls' doing: give them to a fresh one."""
        for call in worker.calls:
            call.lost += 1
        if not worker.sent or max(call.lost for call in worker.calls) >= _LOST_SENDS:
            self._died(worker)
            return
        self._submitted.make_first(worker.calls)
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        self._look_for_strays()  # what it left behind ends with it
        worker.process.kill()
        self._workers[worker.place] = self._spawn(worker.place)

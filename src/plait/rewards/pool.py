"""The reward pool: groups of samples go to worker processes, scores come back; nothing that fails is silent.

A call is one function over one group. A call that fails as a whole (it raises, passes its time limit, kills its
worker, returns a wrong count) is made again for each sample alone, which finds the culprit, then for the others
together, which it may compare; a score that is no number names its sample at once. The pool has no thread: it moves on
inside `poll` and `wait`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

from plait.data.records import Sample
from plait.errors import ConfigError, RunError
from plait.rewards.call_workers import CallWorkers
from plait.rewards.calls import missing_arguments
from plait.rewards.functions import RewardFunction
from plait.rewards.scores import GroupScores
from plait.rewards.settings import RewardSettings, TurnSettings
from plait.rewards.submitted import Submitted
from plait.rewards.worker import IN_WORKER

_TICK_S = 0.2
"""Longest sleep before workers are looked after again."""
_BY_DEFAULT = RewardSettings()


class RewardPool:
    """Runs reward functions over groups of samples in worker processes.

    Args:
        functions: see `functions.reward_functions`; of one kind.
        settings: limits of calls and of workers, and what follows where a function fails: STOP raises RunError; DROP
            leaves the sample without a reward (NaN), counted.
        seed: of random numbers that functions draw from `random` and `numpy.random`.
        output: file to which the functions' own prints are appended; by default they go to stderr.

    Whatever looks after the workers (`start`, `submit`, `look`, `poll`, `wait`) raises ConfigError where a function
    cannot be loaded, and under STOP RunError where one has failed or a child that it forked came back.

    Raises:
        ConfigError: `memory_gb` is set, and this is no Linux.
        RunError: it is made in a reward worker.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        settings: RewardSettings | TurnSettings = _BY_DEFAULT,
        *,
        seed: int = 0,
        output: Path | None = None,
    ) -> None:
        assert functions, "a pool needs a function"
        if os.environ.get(IN_WORKER):
            raise RunError(
                "a reward worker has imported a file that starts a run when it is imported; "
                "put that part under `if __name__ == '__main__':`"
            )
        if settings.memory_bytes is not None and sys.platform != "linux":
            raise ConfigError(f"`{functions[0].kind.section}.memory_gb` works on Linux only; remove it")
        self.functions = tuple(functions)
        self._submitted = Submitted(functions, settings.on_error)
        self._workers = CallWorkers(functions, self._submitted, settings, seed=seed, output=output)
        self.looked: Callable[[], None] = lambda: None
        """Called whenever the workers are looked after: while it waits, several times a second."""

    def start(self, columns: Sequence[str] | None = None) -> None:
        """Wait until the functions are loaded, and check that the data have every column that they need.

        Raises:
            ConfigError: a function needs a column that is not among `columns`.
        """
        while self._workers.signatures is None:
            self._pump(_TICK_S)
        if columns is not None:
            self.check_columns(columns)

    def check_columns(self, columns: Sequence[str], title: str = "") -> None:
        """Check that data have every column that the loaded functions need.

        Args:
            title: which data, where they are not those of training.

        Raises:
            ConfigError: a function needs a column that is not among `columns`.
        """
        assert self._workers.signatures is not None, "the pool has not started"
        for function, signature in zip(self.functions, self._workers.signatures, strict=True):
            if problem := missing_arguments(function, signature, columns):
                raise ConfigError(f"{title}: {problem}" if title else problem)

    def close(self) -> None:
        """Kill the workers and what they started; wait until they are gone. Harmless when done before."""
        self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, samples: Sequence[Sample], rollout: str = "") -> int:
        """Hand in all samples of one prompt. Returns the ticket that their scores will carry. Never blocks for long.

        Args:
            rollout: the call that drew them, where the flow has several (`Dataflow.rollout_name`).
        """
        assert not self._workers.closed, "the pool is closed"
        ticket = self._submitted.add(samples, rollout)
        self._workers.dispatch()
        return ticket

    @property
    def num_outstanding(self) -> int:
        """Groups handed in whose scores have not been given out."""
        return self._submitted.num_pending + self._submitted.num_finished

    def look(self) -> None:
        """Take in what workers have said, for a later `poll`; and give them further work."""
        if self._submitted.num_pending:
            self._pump(0.0)

    def poll(self) -> list[GroupScores]:
        """Scores of the groups that have become done, without waiting."""
        assert not self._workers.closed, "the pool is closed"
        self._pump(0.0)
        return self._submitted.take()

    def news(self) -> tuple[list[Connection], float] | None:
        """What to wait on before the next `look`, and how many seconds at most; None where nothing is outstanding.
        Scores that a look has taken in end no wait: they may be for later."""
        connections, left_s = self._workers.awaited()
        return (connections, left_s) if connections or self._submitted.num_finished else None

    def wait(self) -> list[GroupScores]:
        """Scores of every outstanding group, in the order of their tickets. The time limits of the calls bound it."""
        while self._submitted.num_pending:
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

    def _pump(self, timeout_s: float) -> None:
        self.looked()
        self._workers.pump(timeout_s)

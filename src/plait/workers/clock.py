"""The clock of a run: one action of a call at a time, recorded and shown; and where none can go on, the wait for other
ranks and for reward functions."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from plait.errors import RunError
from plait.observe.progress import ProgressSink
from plait.rewards.pool import RewardPool
from plait.schedule.dispatch import Task
from plait.schedule.work import Done
from plait.workers.ranks import LEADER, WAIT_S
from plait.workers.recorder import Recorder
from plait.workers.status_file import StatusFile
from plait.workers.transport import Transport

LOOK_BETWEEN_S = 0.05
"""Between two looks at reward functions before actions: rollouts look at them with each of their own steps."""

LOOK_S = 1.0
"""Between two looks at reward functions that say nothing."""


class RunClock:
    """`schedule.dispatch.Clock` of the process that leads a run."""

    def __init__(
        self,
        transport: Transport,
        status: StatusFile,
        pools: Collection[RewardPool],
        recorder: Recorder,
        progress: ProgressSink,
    ) -> None:
        self._transport = transport
        self._status = status
        self._pools = tuple(pools)
        self._recorder = recorder
        self._progress = progress
        self._last_s = time.monotonic()
        """When a call has gone on; before that, when this clock was made."""
        self._looked_s = 0.0

    def advance(self, task: Task) -> Done | None:
        """Raises what the call raises, and what reward functions raise that somebody will ask for."""
        if time.monotonic() - self._looked_s >= LOOK_BETWEEN_S:
            self._look()
        with self._status.doing(task.name):
            done = self._recorder.advance(task.work, task.role)
        if done is not None:
            self._progress.advance(done.units)
            self._last_s = time.monotonic()
        return done

    def wait(self, tasks: Sequence[Task]) -> None:
        """Raises RunError: nothing has come for WAIT_S."""
        news_of_pools = [news for pool in self._pools if (news := pool.news()) is not None]
        links = [link for of_pool, _ in news_of_pools for link in of_pool]
        left_s = self._last_s + WAIT_S - time.monotonic()
        seconds = min([LOOK_S, *(seconds for _, seconds in news_of_pools)]) if news_of_pools else left_s
        others = [task for task in tasks if (task.mesh | task.shares) - {LEADER}]
        ranks = sorted({rank for task in others for rank in (task.mesh | task.shares) - {LEADER}})
        assert ranks or news_of_pools, f"nobody would ever go on with {[task.name for task in tasks]}"
        whom = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        what = f"{whom} ({', '.join(task.name for task in others)})" if ranks else "reward functions"
        with self._status.doing(tasks[0].name):
            self._transport.wait(max(0.0, seconds), what, links)
        self._look()
        if not news_of_pools and time.monotonic() - self._last_s >= WAIT_S:
            raise RunError(f"rank {LEADER} expected a sign from {what} within {WAIT_S:g} s")

    def _look(self) -> None:
        """Groups of later batches are scored while no call asks for them."""
        self._looked_s = time.monotonic()
        for pool in self._pools:
            pool.look()

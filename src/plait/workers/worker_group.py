"""All ranks of a run, as the leader sees them: what is asked of the whole run, and the engines of its roles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from plait.engines import GroupEngine
from plait.observe.progress import ProgressSink
from plait.policy.decode_ring import StageUse, busy_shares
from plait.rewards.pool import RewardPool
from plait.schedule.timeline import Span
from plait.speculation.counts import Counts
from plait.workers.announcer import Announcer
from plait.workers.checkpoint_parts import CheckpointParts
from plait.workers.clock import RunClock
from plait.workers.commands import End
from plait.workers.draft_knowledge import DraftKnowledge
from plait.workers.offload_manager import Need
from plait.workers.ranks import LEADER
from plait.workers.remote_engine import RemoteEngine
from plait.workers.remote_trainer import RemoteTrainer
from plait.workers.upkeep import Gather, Recorded, Spans
from plait.workers.vllm_engines import open_vllm

OPENS: Mapping[str, Callable[[Announcer, str, ExitStack], GroupEngine]] = {
    "plait": lambda announcer, role, ends: RemoteEngine(announcer, role),
    "vllm": open_vllm,
}
"""`sampling.engine` → what opens it for a role; what it has running for itself is ended with the stack."""


class WorkerGroup:
    """All ranks of a run.

    Args:
        announcer: the leader's.
        num_ranks: of the run, the leader included.
    """

    def __init__(self, announcer: Announcer, num_ranks: int) -> None:
        self.announcer = announcer
        self.rank_state = announcer.rank_state
        self._recorder = announcer.recorder
        self._ranks = tuple(range(num_ranks))
        self._engines: dict[str, GroupEngine] = {}
        self._ends = ExitStack()
        self._counted = (0, 0)
        self._speculation: dict[str, Counts] = {}
        self._uses: list[StageUse] = []
        """What ranks said since the last `performance`."""
        self._peak_bytes: list[tuple[int, int | None]] = []
        """`peak_memory.peak_bytes` of each rank's process, as it said last."""
        self.rank_state.offloads.recorder = announcer.recorder
        self.checkpoint = CheckpointParts(announcer, num_ranks)
        self.leader_weights = LeaderWeights(announcer)
        self.draft_knowledge = DraftKnowledge(announcer, num_ranks)

    def spans(self) -> list[Span]:
        """What all ranks recorded since the last time, on the leader's clock. What may leave the devices has."""
        zero_s = self._recorder.zero_s - self.rank_state.ahead_s
        recorded: list[Recorded] = self.announcer.ask(self._ranks, Spans(zero_s), "its timeline")
        self._peak_bytes = [of_rank.peak_bytes for of_rank in recorded]
        self._uses += [use for of_rank in recorded for use in of_rank.uses]
        return [span for of_rank in recorded for span in of_rank.spans]

    def performance(self) -> dict[str, float]:
        """Metrics since the last time: bytes of rows that this rank has sent and received, how drafts went, how busy
        stages were while they decoded; each where there is such a thing. What each rank has held at most, since the run
        began. Both of the latter as of the last `spans`."""
        decoding, self._uses = busy_shares(self._uses), []
        busy = {f"perf/decode_busy/{name}": share for name, share in decoding.items()}
        return self._row_traffic() | self._draft_counts() | busy | self._peaks()

    def _peaks(self) -> dict[str, float]:
        peaks: dict[str, float] = {}
        for rank, (resident, on_device) in enumerate(self._peak_bytes):
            peaks[f"perf/peak_bytes/rank_{rank}"] = resident
            if on_device is not None:
                peaks[f"perf/device_peak_bytes/rank_{rank}"] = on_device
        return peaks

    def _row_traffic(self) -> dict[str, float]:
        if len(self._ranks) == 1:
            return {}
        now = self.announcer.transport.sent_bytes, self.announcer.transport.received_bytes
        sent, received = (after - before for after, before in zip(now, self._counted, strict=True))
        self._counted = now
        return {"perf/rows_sent_bytes": sent, "perf/rows_received_bytes": received}

    def _draft_counts(self) -> dict[str, float]:
        counts = {role: now for role, engine in self._engines.items() if (now := engine.speculation) is not None}
        if not counts:
            return {}
        since = [now.since(self._speculation.get(role, Counts())) for role, now in counts.items()]
        self._speculation |= {role: now + Counts() for role, now in counts.items()}
        return {f"perf/spec/{name}": value for name, value in sum(since, Counts()).figures().items()}

    def sync_references(self, share: float | None) -> None:
        """See `Announcer.sync_references`."""
        self.announcer.sync_references(share)

    def gather(self, role: str) -> Any:
        """The whole model of a role with its current weights: the leader's own model if it is whole, else a new one."""
        command = Gather(role)
        told = self.announcer.tell(self.rank_state.places[role].home.mesh.ranks, command)
        # It is the leader that gathers, whether it has a part of the weights or not.
        return self.announcer.do(replace(told, own=command.run(self.rank_state)))

    def give_up(self) -> str:
        """After an error: what is under way is forgotten, or ends by itself, so that commands are served again.

        Returns:
            Why they will not be, in words that follow `since`; else nothing.
        """
        if why := self.announcer.end_moves():
            return why
        for engine in self._engines.values():
            engine.give_up()
        self.announcer.forget()
        return ""

    def engine(self, role: str) -> GroupEngine | None:
        """That of the role, one for all calls; None: it does not generate.

        Raises:
            ConfigError: the engine that the recipe names is not there, or cannot hold the model.
            RunError: its process died, or was not ready in time.
        """
        if not self.rank_state.places[role].generate:
            return None
        if role not in self._engines:
            self._engines[role] = OPENS[self.rank_state.recipe.sampling.engine](self.announcer, role, self._ends)
        return self._engines[role]

    def trainer(self, role: str) -> RemoteTrainer:
        return RemoteTrainer(self.announcer, role)

    def model(self, role: str) -> Any:
        """What the leader has of a role's model; None: nothing."""
        mine = self.rank_state.roles.get(role)
        return None if mine is None else mine.model

    def clock(self, pools: Collection[RewardPool], progress: ProgressSink) -> RunClock:
        return RunClock(self.announcer.transport, self.announcer.status, pools, self._recorder, progress)

    def tick(self) -> None:
        """The leader goes on: it has not frozen."""
        self.announcer.status.tick()

    def close(self) -> None:
        """Let the other ranks go, whatever they are doing for nobody."""
        self.give_up()
        self.announcer.send(self._ranks, End().to_message())

    def end_engines(self) -> None:
        """End the processes that engines have for themselves, however the run ended."""
        self._ends.close()


class LeaderWeights:
    """`runtime.workers.LeaderWeights`."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer
        self._state = announcer.rank_state

    def now(self, role: str, weights: Tensor) -> Tensor | None:
        """The values of weights [elements, flat] that the leader has of a role, wherever they are; None: not as they
        are by now."""
        is_home = LEADER in self._state.places[role].home.mesh.ranks
        if not is_home and any(
            (role, number) in self._announcer.fresh.stale for number in range(len(self._state.copies[role]))
        ):
            return None
        return self._state.offloads.now(weights)

    @contextlib.contextmanager
    def holding(self) -> Iterator[bool]:
        """Within it the leader's models can be computed with, one after another; whether all of them can."""
        copies = [self._state.copies[role][number] for role, number in self._announcer.fresh.stale]
        gone = [rank for copy in copies if copy.after != "keep" for rank, _ in copy.parts]
        if LEADER in gone:
            yield False
            return
        needs: list[Need] = [(role, what) for role in self._state.roles for what in ("home", "score", "decode")]
        with self._state.offloads.holding(*needs) as all_fit:
            yield all_fit

"""All ranks of a run, as the leader sees them: what is asked of the whole run, and the engines of its roles."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from plait.checkpoint.store import FileDigest, digest_of
from plait.models.files.finite import Broken
from plait.observe.progress import Progress
from plait.rewards.pool import RewardPool
from plait.schedule.timeline import Span
from plait.workers.announcer import Announcer
from plait.workers.clock import RunClock
from plait.workers.messages import Do, Message
from plait.workers.offload_manager import Need
from plait.workers.optimizer_state import refuse_broken
from plait.workers.ranks import LEADER
from plait.workers.remote_engine import RemoteEngine
from plait.workers.remote_trainer import RemoteTrainer


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
        self._others = tuple(range(1, num_ranks))
        self._engines: dict[str, RemoteEngine] = {}
        self._counted = (0, 0)
        self.rank_state.offloads.recorder = announcer.recorder

    def now(self, role: str, weights: Tensor) -> Tensor | None:
        """The values of weights that the leader has of a role, wherever they are; None: not as they are by now."""
        is_home = LEADER in self.rank_state.places[role].home.mesh.ranks
        if not is_home and any(
            (role, number) in self.announcer.stale for number in range(len(self.rank_state.copies[role]))
        ):
            return None
        return self.rank_state.offloads.now(weights)

    @contextlib.contextmanager
    def holding(self) -> Iterator[bool]:
        """Within it the leader's models can be computed with, one after another; whether all of them can."""
        stale = {
            copies for role, n in self.announcer.stale if (copies := self.rank_state.copies[role][n]).after != "keep"
        }
        if any(rank == LEADER for copies in stale for rank, _ in copies.parts):
            yield False
            return
        needs: list[Need] = [(role, what) for role in self.rank_state.roles for what in ("home", "score", "decode")]
        with self.rank_state.offloads.holding(*needs) as there:
            yield there

    def spans(self) -> list[Span]:
        """What the other ranks recorded since the last time, on the leader's clock. What may leave the devices has."""
        self.rank_state.offloads.want()
        number = self.announcer.tell((LEADER, *self._others), Message({"do": Do.SPANS, "zero": self._recorder.zero_s}))
        found: list[Span] = []
        with self.announcer.status.doing("timeline"):
            for rank in self._others:
                found += [
                    Span(*values) for values in self.announcer.answer(rank, number, "its timeline").header["spans"]
                ]
        return found

    def row_traffic(self) -> dict[str, float]:
        """Metrics: bytes of rows that this rank has sent and received since the last time; none where it is alone."""
        if not self._others:
            return {}
        now = self.announcer.transport.sent_bytes, self.announcer.transport.received_bytes
        sent, received = (after - before for after, before in zip(now, self._counted, strict=True))
        self._counted = now
        return {"perf/rows_sent_bytes": sent, "perf/rows_received_bytes": received}

    def save(self, folder: Path) -> tuple[dict[str, FileDigest], dict[str, Any]]:
        """Have each rank write its part of the optimizers' state to an empty folder (`checkpoint.store.WriteParts`).

        Returns:
            Name of a file → its digest; the counts of all roles, under `counts`.

        Raises:
            RunError: a file could not be written, or what a rank has is not finite.
        """
        number = self.announcer.tell((LEADER, *self._others), Message({"do": Do.SAVE, "folder": str(folder)}))
        with self.announcer.status.doing("save"):
            counts, found = self._recorder.drain(self.rank_state.saving_all(folder))
            for rank in self._others:
                header = self.announcer.answer(rank, number, "its part of the checkpoint").header
                counts |= header["counts"]
                found += [Broken(*values) for values in header["broken"]]
        refuse_broken(found)
        return {path.name: digest_of(path) for path in sorted(folder.iterdir())}, {"counts": counts}

    def load(self, folder: Path, counts: Mapping[str, Mapping[str, int]] | None, threads: int) -> None:
        """Have each rank read its part from a checkpoint of any plan, and bring all weights to where they are used."""
        header = {"do": Do.LOAD, "folder": str(folder), "counts": counts, "threads": threads}
        self.announcer.tell((LEADER, *self._others), Message(header))
        with self.announcer.joining("load"):
            self._recorder.drain(self.rank_state.loading_all(folder, counts))
        for role, place in self.rank_state.places.items():
            if place.train is not None:
                self.announcer.trained(role)
                self.announcer.sync_weights(role)
        self.sync_references(None)

    def sync_references(self, share: float | None) -> None:
        """Bring the weights of roles that follow another towards those of that role; see `RankState.following`."""
        for role in self.rank_state.follows:
            self.announcer.follow(role, share)

    def gather(self, role: str) -> Any:
        """The whole model of a role with the weights as they are: the leader's own if it has that, else a new one."""
        self.announcer.tell(self.rank_state.places[role].home.mesh.ranks, Message({"do": Do.GATHER, "role": role}))
        with self.announcer.joining(f"{role}.weights (gather)"):
            return self.rank_state.gather(role)

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

    def engine(self, role: str) -> RemoteEngine | None:
        """That of the role, one for all calls; None: it does not generate."""
        if not self.rank_state.places[role].generate:
            return None
        return self._engines.setdefault(role, RemoteEngine(self.announcer, role))

    def trainer(self, role: str, max_positions: int) -> RemoteTrainer:
        return RemoteTrainer(self.announcer, role, max_positions)

    def model(self, role: str) -> Any:
        """What the leader has of a role's model; None: nothing."""
        mine = self.rank_state.roles.get(role)
        return None if mine is None else mine.model

    def clock(self, pools: Collection[RewardPool], progress: Progress) -> RunClock:
        return RunClock(self.announcer.transport, self.announcer.status, pools, self._recorder, progress)

    def tick(self) -> None:
        """The leader goes on: it has not frozen."""
        self.announcer.status.tick()

    def close(self) -> None:
        """Let the other ranks go, whatever they are doing for nobody."""
        self.give_up()
        self.announcer.tell(self._others, Message({"do": Do.END}))

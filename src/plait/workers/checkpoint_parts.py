"""The optimizers' state of all ranks, written to a checkpoint and read from one: each rank has its part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.checkpoint.digests import digest_of
from plait.checkpoint.store import FileDigest
from plait.models.files.finite import Broken
from plait.workers.announcer import Announcer
from plait.workers.messages import Do, Message
from plait.workers.optimizer_state import refuse_broken
from plait.workers.ranks import LEADER


class CheckpointParts:
    """`runtime.workers.CheckpointParts`: all ranks, as the leader asks them.

    Args:
        num_ranks: of the run, the leader included.
    """

    def __init__(self, announcer: Announcer, num_ranks: int) -> None:
        self._announcer = announcer
        self._state = announcer.rank_state
        self._others = tuple(range(1, num_ranks))

    def save(self, folder: Path) -> tuple[dict[str, FileDigest], dict[str, Any]]:
        """Have each rank write its part of the optimizers' state to an empty folder (`checkpoint.store.WriteParts`).

        Returns:
            Name of a file → its digest; the counts of all roles, under `counts`.

        Raises:
            RunError: a file could not be written, or what a rank has is not finite.
        """
        number = self._announcer.tell((LEADER, *self._others), Message({"do": Do.SAVE, "folder": str(folder)}))
        with self._announcer.status.doing("save"):
            counts, broken = self._announcer.recorder.drain(self._state.optimizers.saving(folder))
            for rank in self._others:
                header = self._announcer.answer(rank, number, "its part of the checkpoint").header
                counts |= header["counts"]
                broken += [Broken(*values) for values in header["broken"]]
        refuse_broken(broken)
        return {path.name: digest_of(path) for path in sorted(folder.iterdir())}, {"counts": counts}

    def load(self, folder: Path, counts: Mapping[str, Mapping[str, int]] | None, threads: int) -> None:
        """Have each rank read its part from a checkpoint of any plan, and bring all weights to where they are used."""
        header = {"do": Do.LOAD, "folder": str(folder), "counts": counts, "threads": threads}
        self._announcer.tell((LEADER, *self._others), Message(header))
        with self._announcer.joining("load"):
            self._announcer.recorder.drain(self._state.optimizers.loading(folder, counts))
        for role, place in self._state.places.items():
            if place.train is not None:
                self._announcer.trained(role)
                self._announcer.sync_weights(role)
        self._announcer.sync_references(None)

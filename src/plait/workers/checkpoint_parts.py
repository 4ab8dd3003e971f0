"""The optimizers' state of all ranks, written to a checkpoint and read from one: each rank has its part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import RunError
from plait.models.files.tensor_file import FileDigest
from plait.workers.announcer import Announcer
from plait.workers.optimizer_state import refuse_broken
from plait.workers.upkeep import Load, Save, Saved


class CheckpointParts:
    """`runtime.workers.CheckpointParts`: all ranks, as the leader asks them.

    Args:
        num_ranks: of the run, the leader included.
    """

    def __init__(self, announcer: Announcer, num_ranks: int) -> None:
        self._announcer = announcer
        self._state = announcer.rank_state
        self._ranks = tuple(range(num_ranks))

    def save(self, folder: Path) -> tuple[dict[str, FileDigest], dict[str, Any]]:
        """Have each rank write its part of the optimizers' state to an empty folder (`checkpoint.store.WriteParts`).

        Returns:
            Name of a file → its digest, as the rank that wrote it read it; the counts of all roles, under `counts`.

        Raises:
            RunError: a file could not be written, what a rank has is not finite, or the leader does not find
                what the ranks wrote.
        """
        saved: list[Saved] = self._announcer.ask(self._ranks, Save(str(folder)), "its part of the checkpoint")
        counts = {role: of_role for of_rank in saved for role, of_role in of_rank.counts.items()}
        broken = [name for of_rank in saved for name in of_rank.broken]
        refuse_broken(broken)
        digests = {name: digest for of_rank in saved for name, digest in of_rank.digests.items()}
        for name, digest in digests.items():
            found = path.stat().st_size if (path := folder / name).is_file() else "no file"
            if found != digest.size_bytes:
                raise RunError(
                    f"{path}: expected {digest.size_bytes} bytes, as a rank wrote, found {found}; all nodes must see "
                    "one `run_dir`"
                )
        return dict(sorted(digests.items())), {"counts": counts}

    def load(self, folder: Path, counts: Mapping[str, Mapping[str, int]] | None, threads: int) -> None:
        """Have each rank read its part from a checkpoint of any plan, and bring all weights to where they are used."""
        self._announcer.do(self._announcer.tell(self._ranks, Load(str(folder), counts, threads)))
        for role, place in self._state.places.items():
            if place.train is not None:
                self._announcer.fresh.trained(role)
                self._announcer.sync_weights(role)
        self._announcer.sync_references(None)

"""The optimizer's state of the roles that a rank trains: written to checkpoints, and read from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.layout.mesh import Cluster
from plait.layout.params import Parameters
from plait.models.files.finite import Broken
from plait.models.files.tensor_file import FileDigest
from plait.schedule.work import Work
from plait.workers.offload_manager import OffloadManager
from plait.workers.optimizer_state import broken_state, loading_state, saving_state

if TYPE_CHECKING:
    from plait.training.trainer import Trainer

Counts = dict[str, dict[str, int]]
"""Role → counts of its optimizer."""


@dataclass(frozen=True)
class RankOptimizers:
    """
    trained: role of which this rank trains a part → its trainer, and the parameters of what is trained of the whole
             model; in an order that all ranks share
    """

    trained: Mapping[str, tuple[Trainer, Parameters]]
    offloads: OffloadManager
    cluster: Cluster
    rank: int

    def saving(self, folder: Path) -> Work[tuple[Counts, dict[str, FileDigest], list[Broken]]]:
        """Write what this rank holds. Returns the counts of what it trains, the digests of the files that it wrote, and
        what is not finite: such a role is not written, and the checkpoint cannot be used."""
        counts: Counts = {}
        digests: dict[str, FileDigest] = {}
        broken: list[Broken] = []
        for role, (trainer, _) in self.trained.items():
            self.offloads.want((role, "train"))
            broken += broken_state(trainer, self.rank)
            if not broken:
                counts[role], of_role = yield from saving_state(trainer, self.cluster, self.rank, folder)
                digests |= of_role
        return counts, digests, broken

    def loading(self, folder: Path, counts: Mapping[str, Mapping[str, int]] | None) -> Work[None]:
        """Continue from a checkpoint of any plan; see `optimizer_state.loading_state`.

        Args:
            counts: of its state; None: an early version saved it in one file.
        """
        for role, (trainer, parameters) in self.trained.items():
            self.offloads.want((role, "train"))
            mine = None if counts is None else counts[role]
            yield from loading_state(trainer, parameters, self.cluster, self.rank, folder, mine)

"""The protocols of all that computes for a run; `plait.workers` implements them for any number of ranks, and
`processes` has what leads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from plait.data.records import Sample
from plait.engines import GenerationEngine, TrainingEngine
from plait.models.files.tensor_file import FileDigest
from plait.observe.progress import ProgressSink
from plait.rewards.pool import RewardPool
from plait.schedule.dispatch import Clock
from plait.schedule.timeline import Span
from plait.speculation.knowledge import Known
from plait.workers.recorder import Recorder


class CheckpointParts(Protocol):
    """Writes and reads the optimizers' state, of which each rank has a part."""

    def save(self, folder: Path) -> tuple[dict[str, FileDigest], dict[str, Any]]:
        """Write the optimizers' state to an empty folder (`checkpoint.store.WriteParts`). Raises RunError."""
        ...

    def load(self, folder: Path, counts: Mapping[str, Mapping[str, int]] | None, threads: int) -> None:
        """Continue from a checkpoint of any plan."""
        ...


class LeaderWeights(Protocol):
    """The weights of roles that the leader itself holds."""

    def now(self, role: str, weights: Tensor) -> Tensor | None:
        """The current values of `weights` [elements, flat], which the leader holds of a role on its device or in host
        memory; None: the leader's copy is stale."""
        ...

    def holding(self) -> AbstractContextManager[bool]:
        """The context in which the leader's models can compute, one after another; whether all of them can."""
        ...


class DraftKnowledge(Protocol):
    """The knowledge of engines that draft: what they have learned, each rank for itself, and earlier texts."""

    def told(self) -> tuple[list[Known], list[str]]:
        """What all instances have learned, and in words what of it is left out."""
        ...

    def take_up(self, known: Sequence[Known]) -> list[str]:
        """Tell it to the engines of a resumed run; in words, what of it is no longer valid."""
        ...

    def recall(self, role: str, samples: Sequence[Sample]) -> None:
        """Tell the engine of a role what the role drew earlier, the newest last. Nothing is in flight."""
        ...


class WorkersState(Protocol):
    """What the workers hold that a checkpoint keeps and an inspection reads."""

    @property
    def checkpoint(self) -> CheckpointParts: ...

    @property
    def leader_weights(self) -> LeaderWeights: ...

    @property
    def draft_knowledge(self) -> DraftKnowledge: ...


class Workers(WorkersState, Protocol):
    """All that computes for a run: one process or several, of which one leads."""

    def engine(self, role: str) -> GenerationEngine | None:
        """The engine of a role, one for all its calls; None: the role does not generate."""
        ...

    def trainer(self, role: str) -> TrainingEngine: ...

    def model(self, role: str) -> Any:
        """The leader's part of a role's model; None: it has none."""
        ...

    def clock(self, pools: Collection[RewardPool], progress: ProgressSink) -> Clock:
        """Advances calls, records their actions and waits for other ranks."""
        ...

    def tick(self) -> None:
        """Tell the supervisor that the leader is alive."""
        ...

    def spans(self) -> list[Span]:
        """What all ranks recorded since the last call, on the leader's clock."""
        ...

    def performance(self) -> dict[str, float]:
        """Metrics since the last call: bytes of rows sent and received, counts of drafts, how busy pipeline stages
        were in generation, each if there is such a thing; and the peak memory of each rank."""
        ...

    def sync_references(self, share: float | None) -> None:
        """Update roles that follow another role: `share` is the weight of its current weights in their average."""
        ...

    def gather(self, role: str) -> Any:
        """The whole model of a role with its current weights."""
        ...

    def give_up(self) -> str:
        """After an error: forget what is under way. Returns why nothing can be asked any longer, else an empty text."""
        ...

    def close(self) -> None:
        """Let the other ranks go."""
        ...

    def end_engines(self) -> None:
        """End the processes of engines that have one, however the run ended."""
        ...


class Leading(Protocol):
    """What leads the ranks of a run: this process alone, or the one of rank 0."""

    def progress(self) -> AbstractContextManager[ProgressSink]:
        """Where the progress of the run is shown, while inside."""
        ...

    def workers(self, recorder: Recorder, *, loads: bool = False) -> Workers:
        """All ranks, with their models loaded.

        Args:
            loads: whether a checkpoint is loaded next: what optimizers begin with is not read before.
        """
        ...

"""What the main loop asks of all that computes for a run; `plait.workers` fills it for any number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from plait.checkpoint.store import FileDigest
from plait.data.records import Sample
from plait.engines import GenerationEngine, TrainingEngine
from plait.observe.progress import Progress
from plait.rewards.pool import RewardPool
from plait.schedule.dispatch import Clock
from plait.schedule.timeline import Span
from plait.speculation.knowledge import Known


class CheckpointParts(Protocol):
    """The optimizers' state, of which each rank writes and reads its part."""

    def save(self, folder: Path) -> tuple[dict[str, FileDigest], dict[str, Any]]:
        """Write the optimizers' state to an empty folder (`checkpoint.store.WriteParts`). Raises RunError."""
        ...

    def load(self, folder: Path, counts: Mapping[str, Mapping[str, int]] | None, threads: int) -> None:
        """Continue from a checkpoint of any plan."""
        ...


class LeaderWeights(Protocol):
    """What the leader has of the roles' weights."""

    def now(self, role: str, weights: Tensor) -> Tensor | None:
        """The values of weights [elements, flat] that the leader has of a role, wherever they are; None: not as they
        are by now."""
        ...

    def holding(self) -> AbstractContextManager[bool]:
        """Within it the leader's models can be computed with, one after another; whether all of them can."""
        ...


class KnownTexts(Protocol):
    """What engines that guess know from before."""

    def recall(self, role: str, samples: Sequence[Sample]) -> None:
        """The engine of a role is told what the role drew earlier, the newest last. Nothing is in flight."""
        ...


class GuessKnowledge(Protocol):
    """What engines that guess have learned, each rank its own."""

    def told(self) -> tuple[list[Known], list[str]]:
        """That of all instances that have learned something; what of it is left out, in words."""
        ...

    def take_up(self, known: Sequence[Known]) -> list[str]:
        """The engines of a resumed run know it; what of it holds no longer, in words."""
        ...


class Workers(Protocol):
    """All that computes for a run: one process or several, of which one leads."""

    checkpoint: CheckpointParts
    leader_weights: LeaderWeights
    known_texts: KnownTexts
    guess_knowledge: GuessKnowledge

    def engine(self, role: str) -> GenerationEngine | None:
        """That of a role, one for all calls; None: the role does not generate."""
        ...

    def trainer(self, role: str) -> TrainingEngine: ...

    def model(self, role: str) -> Any:
        """What the leader has of a role's model; None: nothing."""
        ...

    def clock(self, pools: Collection[RewardPool], progress: Progress) -> Clock:
        """What goes on with calls, records them and waits for others."""
        ...

    def tick(self) -> None:
        """The leader goes on: it has not frozen."""
        ...

    def spans(self) -> list[Span]:
        """What the others recorded since the last time, on the leader's clock."""
        ...

    def performance(self) -> dict[str, float]:
        """Metrics since the last time: rows sent and received, how drafts went, how busy stages were in generation;
        each where there is such a thing. What each rank has held at most."""
        ...

    def sync_references(self, share: float | None) -> None:
        """Bring the weights of roles that follow another towards those of that role, which get this share."""
        ...

    def gather(self, role: str) -> Any:
        """The whole model of a role with the weights as they are."""
        ...

    def give_up(self) -> str:
        """After an error: forget what is under way. Why nothing can be asked any longer, in words; else nothing."""
        ...

    def close(self) -> None:
        """Let the others go."""
        ...

    def end_engines(self) -> None:
        """End the processes that engines have for themselves, however the run ended."""
        ...

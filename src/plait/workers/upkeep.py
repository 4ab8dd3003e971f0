"""What the leader has ranks do without a call of the flow behind it; each a record that says a rank's part of it, and
what is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from plait.models.files.finite import Broken
from plait.models.files.tensor_file import FileDigest
from plait.policy.decode_ring import StageUse
from plait.schedule.timeline import Span
from plait.schedule.work import Work, at_once
from plait.workers.drawn_texts import DrawnTexts
from plait.workers.messages import Message
from plait.workers.peak_memory import peak_bytes
from plait.workers.rank_optimizers import Counts
from plait.workers.rank_state import RankState
from plait.workers.wire_forms import Record


@dataclass(frozen=True)
class Version(Record):
    """The engine of a role has new weights."""

    role: str
    version: int

    kind: ClassVar[str] = "version"

    @at_once
    def run(self, rank_state: RankState) -> None:
        rank_state.listeners[self.role].update_weights(self.version)


@dataclass(frozen=True)
class EndTurns(Record):
    """Samples of a role that have ended do not go on."""

    role: str

    kind: ClassVar[str] = "end turns"

    @at_once
    def run(self, rank_state: RankState) -> None:
        rank_state.listeners[self.role].end_turns()


@dataclass(frozen=True)
class Recall(Record):
    """What a role drew earlier or elsewhere, for its engine to draft from. No other rank has a part in it."""

    role: str
    texts: DrawnTexts

    kind: ClassVar[str] = "recall"

    @at_once
    def run(self, rank_state: RankState) -> None:
        engine = rank_state.roles[self.role].engine
        assert engine is not None, f"role {self.role} has no engine on rank {rank_state.rank}"
        for prompt_ids, token_ids, logprobs in self.texts:
            engine.speculates.recall(prompt_ids, token_ids, logprobs)


@dataclass(frozen=True)
class Gather(Record):
    """The whole weights of a role, for the leader."""

    role: str

    kind: ClassVar[str] = "gather"

    @at_once
    def run(self, rank_state: RankState) -> Any:
        """See `RankState.gather`."""
        return rank_state.gather(self.role)


@dataclass(frozen=True)
class Save(Record):
    """A rank's part of the optimizers' state, to a folder."""

    folder: str

    kind: ClassVar[str] = "save"
    role = ""

    def run(self, rank_state: RankState) -> Work[Saved]:
        counts, digests, broken = yield from rank_state.optimizers.saving(Path(self.folder))
        return Saved(counts, digests, broken)

    @staticmethod
    def result_of(message: Message) -> Saved:
        return Saved.of(message)


@dataclass(frozen=True)
class Saved(Record):
    """What a rank trains has these counts, the files that it wrote these digests, and this is not finite."""

    counts: Counts
    digests: Mapping[str, FileDigest]
    broken: Sequence[Broken]

    kind: ClassVar[str] = "saved"


@dataclass(frozen=True)
class Load(Record):
    """A rank's part of the optimizers' state, from the folder of a checkpoint.

    counts:  see `RankOptimizers.loading`
    threads: that the rank computes with from now on
    """

    folder: str
    counts: Mapping[str, Mapping[str, int]] | None
    threads: int

    kind: ClassVar[str] = "load"
    role = ""

    def run(self, rank_state: RankState) -> Work[None]:
        torch.set_num_threads(self.threads)
        yield from rank_state.optimizers.loading(Path(self.folder), self.counts)


@dataclass(frozen=True)
class Spans(Record):
    """What a rank has recorded since the last time. What may leave its device does.

    zero_s: when the clock that the times are to be on was 0, on the one that all ranks tell times by
    """

    zero_s: float

    kind: ClassVar[str] = "spans"
    role = ""

    @at_once
    def run(self, rank_state: RankState) -> Recorded:
        rank_state.offloads.want()
        recorder = rank_state.recorder
        later_s = self.zero_s - (recorder.zero_s - rank_state.ahead_s)
        spans = [
            replace(span, start_s=span.start_s - later_s, end_s=span.end_s - later_s) for span in recorder.take().spans
        ]
        return Recorded(spans, [listener.take_use() for listener in rank_state.listeners.values()], peak_bytes())

    @staticmethod
    def result_of(message: Message) -> Recorded:
        return Recorded.of(message)


@dataclass(frozen=True)
class Recorded(Record):
    """
    uses:       how busy the rank was as a stage of the instances that it is in
    peak_bytes: see `peak_memory.peak_bytes`
    """

    spans: Sequence[Span]
    uses: Sequence[StageUse]
    peak_bytes: tuple[int, int | None]

    kind: ClassVar[str] = "recorded"

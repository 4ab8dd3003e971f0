"""What the leader has ranks do without a call of the flow behind it; each a record that says its wire form, a rank's
part of it, and what is answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ValidationError

from plait.cost.machine import machine_name
from plait.data.records import Sample
from plait.generation.speculates import Speculates
from plait.models.files.finite import Broken
from plait.policy.decode_ring import StageUse
from plait.schedule.timeline import Span
from plait.schedule.work import Work
from plait.settings import what_is_refused
from plait.speculation.knowledge import Circumstances, Known
from plait.workers.messages import Message, Plain, pack_samples, unpack_samples
from plait.workers.peak_memory import peak_bytes
from plait.workers.rank_optimizers import Counts
from plait.workers.rank_state import RankState


@dataclass(frozen=True)
class Version(Plain):
    """The engine of a role has new weights."""

    role: str
    version: int

    kind: ClassVar[str] = "version"

    def run(self, rank_state: RankState) -> Work[None]:
        rank_state.listeners[self.role].update_weights(self.version)
        return
        yield


@dataclass(frozen=True)
class Recall:
    """What a role drew earlier, for its engine to guess from."""

    role: str
    samples: Sequence[Sample]

    kind: ClassVar[str] = "recall"

    def to_message(self) -> Message:
        return Message({"role": self.role}, pack_samples(self.samples), self.kind)

    @classmethod
    def of(cls, message: Message) -> Recall:
        return cls(message.header["role"], unpack_samples(message.arrays))

    def run(self, rank_state: RankState) -> Work[None]:
        engine = rank_state.roles[self.role].engine
        assert engine is not None, f"role {self.role} has no engine on rank {rank_state.rank}"
        for sample in self.samples:
            engine.speculates.recall(sample.prompt.token_ids, sample.token_ids, sample.logprobs)
        return
        yield


@dataclass(frozen=True)
class Gather(Plain):
    """The whole weights of a role, for the leader."""

    role: str

    kind: ClassVar[str] = "gather"

    def run(self, rank_state: RankState) -> Work[Any]:
        """See `RankState.gather`."""
        return rank_state.gather(self.role)
        yield


@dataclass(frozen=True)
class Save(Plain):
    """A rank's part of the optimizers' state, to a folder."""

    folder: str

    kind: ClassVar[str] = "save"

    @property
    def role(self) -> str:
        return ""

    def run(self, rank_state: RankState) -> Work[Saved]:
        counts, broken = yield from rank_state.optimizers.saving(Path(self.folder))
        return Saved(counts, broken)

    @staticmethod
    def result_of(message: Message) -> Saved:
        return Saved(message.header["counts"], [Broken(*values) for values in message.header["broken"]])


@dataclass(frozen=True)
class Saved(Plain):
    """What a rank trains has these counts, and this of it is not finite."""

    counts: Counts
    broken: Sequence[Broken]

    kind: ClassVar[str] = "saved"


@dataclass(frozen=True)
class Load(Plain):
    """A rank's part of the optimizers' state, from the folder of a checkpoint.

    counts:  see `RankOptimizers.loading`
    threads: that the rank computes with from now on
    """

    folder: str
    counts: Mapping[str, Mapping[str, int]] | None
    threads: int

    kind: ClassVar[str] = "load"

    @property
    def role(self) -> str:
        return ""

    def run(self, rank_state: RankState) -> Work[None]:
        torch.set_num_threads(self.threads)
        yield from rank_state.optimizers.loading(Path(self.folder), self.counts)


@dataclass(frozen=True)
class Spans(Plain):
    """What a rank has recorded since the last time. What may leave its device does.

    zero_s: when the clock that the times are to be on was 0, on the one that all processes of a machine share
    """

    zero_s: float

    kind: ClassVar[str] = "spans"

    @property
    def role(self) -> str:
        return ""

    def run(self, rank_state: RankState) -> Work[Recorded]:
        rank_state.offloads.want()
        recorder = rank_state.recorder
        later_s = self.zero_s - recorder.zero_s
        spans = [
            replace(span, start_s=span.start_s - later_s, end_s=span.end_s - later_s) for span in recorder.take().spans
        ]
        return Recorded(spans, [listener.take_use() for listener in rank_state.listeners.values()], peak_bytes())
        yield

    @staticmethod
    def result_of(message: Message) -> Recorded:
        header = message.header
        uses = [StageUse(*values) for values in header["uses"]]
        return Recorded([Span(*values) for values in header["spans"]], uses, tuple(header["peak_bytes"]))


@dataclass(frozen=True)
class Recorded:
    """
    uses:       how busy the rank was as a stage of the instances that it is in
    peak_bytes: see `peak_memory.peak_bytes`
    """

    spans: Sequence[Span]
    uses: Sequence[StageUse]
    peak_bytes: tuple[int, int | None]

    kind: ClassVar[str] = "recorded"

    def to_message(self) -> Message:
        header = {"spans": [astuple(span) for span in self.spans], "uses": [astuple(use) for use in self.uses]}
        return Message({**header, "peak_bytes": self.peak_bytes}, kind=self.kind)


@dataclass(frozen=True)
class TellKnowledge(Plain):
    """What this rank's engines have learned."""

    kind: ClassVar[str] = "tell-knowledge"

    @property
    def role(self) -> str:
        return ""

    def run(self, rank_state: RankState) -> Work[KnowledgeTold]:
        told, notes = [], []
        for role, role_state in rank_state.roles.items():
            if role_state.engine is None:
                continue
            try:
                known = _known(rank_state, role, role_state.engine.speculates)
            except ValidationError as error:  # it is worth no checkpoint
                why = what_is_refused(error)
                notes.append(f"what rank {rank_state.rank} has learned of those of {role} is not kept: {why}")
                continue
            told += [] if known is None else [known]
        return KnowledgeTold(told, notes)
        yield

    @staticmethod
    def result_of(message: Message) -> KnowledgeTold:
        return KnowledgeTold(_unpacked(message), message.header["notes"])


@dataclass(frozen=True)
class KnowledgeTold:
    """An answer: of each role that guesses on the rank.

    notes: what of it is left out, in words
    """

    known: Sequence[Known]
    notes: Sequence[str]

    kind: ClassVar[str] = "knowledge-told"

    def to_message(self) -> Message:
        return Message({"known": _packed(self.known), "notes": list(self.notes)}, kind=self.kind)


@dataclass(frozen=True)
class TakeUpKnowledge:
    """This rank's engines know what those before them had learned."""

    known: Sequence[Known]

    kind: ClassVar[str] = "take-up-knowledge"

    @property
    def role(self) -> str:
        return ""

    def to_message(self) -> Message:
        return Message({"known": _packed(self.known)}, kind=self.kind)

    @classmethod
    def of(cls, message: Message) -> TakeUpKnowledge:
        return cls(_unpacked(message))

    def run(self, rank_state: RankState) -> Work[KnowledgeTaken]:
        notes = []
        for role, role_state in rank_state.roles.items():
            of_role = sorted((one for one in self.known if one.role == role), key=lambda one: one.instance)
            if role_state.engine is None or not of_role:
                continue
            before = of_role[_instance(rank_state, role) % len(of_role)]
            why = before.circumstances.differs(_circumstances(rank_state, role))
            speculates = role_state.engine.speculates
            speculates.take_up(before.knowledge.elsewhere if why else before.knowledge)
            if why and speculates.counts is not None:
                notes.append(f"rank {rank_state.rank} learns anew what steps of {role} take, as {why}")
        return KnowledgeTaken(notes)
        yield

    @staticmethod
    def result_of(message: Message) -> KnowledgeTaken:
        return KnowledgeTaken(**message.header)


@dataclass(frozen=True)
class KnowledgeTaken(Plain):
    """An answer: what of it did not hold on the rank, in words."""

    notes: Sequence[str]

    kind: ClassVar[str] = "knowledge-taken"


def _known(rank_state: RankState, role: str, speculates: Speculates) -> Known | None:
    """What an engine of this rank has learned; None: it learns nothing. Raises ValidationError."""
    knowledge = speculates.knowledge()
    if knowledge is None:
        return None
    circumstances, instance = _circumstances(rank_state, role), _instance(rank_state, role)
    return Known(role=role, instance=instance, circumstances=circumstances, knowledge=knowledge)


def _instance(rank_state: RankState, role: str) -> int:
    """The place of this rank's instance among those of a role."""
    layouts = rank_state.places[role].generate
    return next(place for place, layout in enumerate(layouts) if rank_state.rank in layout.mesh.ranks)


def _circumstances(rank_state: RankState, role: str) -> Circumstances:
    """Those of the instance of a role that this rank is in."""
    recipe, role_state = rank_state.recipe, rank_state.roles[role]
    assert role_state.instance is not None, f"role {role} does not generate on rank {rank_state.rank}"
    parallelism = role_state.instance.layout.parallelism
    return Circumstances(
        machine=machine_name(recipe.device),
        device=recipe.device,
        ranks=rank_state.cluster.num_devices,
        threads=torch.get_num_threads(),
        dtype=recipe.dtype.value,
        exact=recipe.sampling.exact,
        model=role_state.role_model.name,
        draft_model=recipe.sampling.draft_model,
        tp=parallelism.tp,
        pp=parallelism.pp,
    )


def _packed(known: Sequence[Known]) -> list[dict[str, Any]]:
    return [each.model_dump(mode="json") for each in known]


def _unpacked(message: Message) -> list[Known]:
    return [Known.model_validate(each) for each in message.header["known"]]

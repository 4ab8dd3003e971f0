"""What engines have learned about guesses, asked of all ranks for a checkpoint, and told to those of a resumed run:
each instance has what the one in its place had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from plait.cost.machine import machine_name
from plait.schedule.work import Work
from plait.settings import Settings
from plait.speculation.knowledge import Knowledge
from plait.workers.announcer import Announcer
from plait.workers.messages import Message, Plain
from plait.workers.rank_state import RankState


class Circumstances(Settings):
    """What the seconds of an engine's steps depend on."""

    machine: str
    device: str
    ranks: int
    """Of the run: those of a machine share its memory."""
    threads: int
    dtype: str
    exact: bool
    model: str
    draft_model: str | None
    tp: int
    pp: int

    @classmethod
    def of(cls, rank_state: RankState, role: str) -> Circumstances:
        """Those of the instance of a role that this rank is in."""
        recipe, role_state = rank_state.recipe, rank_state.roles[role]
        assert role_state.instance is not None, f"role {role} does not generate on rank {rank_state.rank}"
        parallelism = role_state.instance.layout.parallelism
        return cls(
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

    def differs(self, now: Circumstances) -> str:
        """What is otherwise now, in words; nothing: all is as it was."""
        for name in type(self).model_fields:
            if (before := getattr(self, name)) != (other := getattr(now, name)):
                return f"`{name}` was {before} and is {other}"
        return ""


class Known(Settings):
    """What an instance of a role had learned."""

    role: str
    instance: int
    """Its place among those of the role."""
    circumstances: Circumstances
    knowledge: Knowledge


@dataclass(frozen=True)
class TellKnowledge(Plain):
    """What this rank's engines have learned."""

    kind: ClassVar[str] = "tell-knowledge"

    @property
    def role(self) -> str:
        return ""

    def run(self, rank_state: RankState) -> Work[KnowledgeTold]:
        told = []
        for role, role_state in rank_state.roles.items():
            knowledge = None if role_state.engine is None else role_state.engine.speculates.knowledge()
            if knowledge is not None:
                circumstances = Circumstances.of(rank_state, role)
                instance = _instance(rank_state, role)
                told.append(Known(role=role, instance=instance, circumstances=circumstances, knowledge=knowledge))
        return KnowledgeTold(told)
        yield

    @staticmethod
    def result_of(message: Message) -> KnowledgeTold:
        return KnowledgeTold(_unpacked(message))


@dataclass(frozen=True)
class KnowledgeTold:
    """An answer: of each role that guesses on the rank."""

    known: Sequence[Known]

    kind: ClassVar[str] = "knowledge-told"

    def to_message(self) -> Message:
        return _packed(self.known, self.kind)


@dataclass(frozen=True)
class TakeUpKnowledge:
    """This rank's engines know what those before them had learned."""

    known: Sequence[Known]

    kind: ClassVar[str] = "take-up-knowledge"

    @property
    def role(self) -> str:
        return ""

    def to_message(self) -> Message:
        return _packed(self.known, self.kind)

    @classmethod
    def of(cls, message: Message) -> TakeUpKnowledge:
        return cls(_unpacked(message))

    def run(self, rank_state: RankState) -> Work[KnowledgeTaken]:
        notes = []
        for role, role_state in rank_state.roles.items():
            of_role = [known for known in self.known if known.role == role]
            if role_state.engine is None or not of_role:
                continue
            of_role.sort(key=lambda known: known.instance)
            before = of_role[_instance(rank_state, role) % len(of_role)]
            why = before.circumstances.differs(Circumstances.of(rank_state, role))
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


class GuessKnowledge:
    """`runtime.workers.GuessKnowledge`: all ranks, as the leader asks them.

    Args:
        num_ranks: of the run, the leader included.
    """

    def __init__(self, announcer: Announcer, num_ranks: int) -> None:
        self._announcer = announcer
        self._ranks = tuple(range(num_ranks))

    def told(self) -> list[Known]:
        """See GuessKnowledge.told."""
        answers = self._announcer.ask(self._ranks, TellKnowledge(), "what it has learned of guesses")
        return [known for answer in answers for known in answer.known]

    def take_up(self, known: Sequence[Known]) -> list[str]:
        """See GuessKnowledge.take_up."""
        command = TakeUpKnowledge(known)
        answers = self._announcer.ask(self._ranks, command, "what it takes up of guesses")
        return [note for answer in answers for note in answer.notes]


def _instance(rank_state: RankState, role: str) -> int:
    """The place of this rank's instance among those of a role."""
    layouts = rank_state.places[role].generate
    return next(place for place, layout in enumerate(layouts) if rank_state.rank in layout.mesh.ranks)


def _packed(known: Sequence[Known], kind: str) -> Message:
    return Message({"known": [each.model_dump(mode="json") for each in known]}, kind=kind)


def _unpacked(message: Message) -> list[Known]:
    return [Known.model_validate(each) for each in message.header["known"]]

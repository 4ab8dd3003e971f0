"""What engines that draft have learned, asked of ranks and told to them: records as those of `upkeep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ValidationError

from plait.cost.machine import machine_name
from plait.generation.speculates import Speculates
from plait.schedule.work import at_once
from plait.settings import what_is_refused
from plait.speculation.knowledge import Circumstances, Known
from plait.workers.messages import Message
from plait.workers.rank_state import RankState
from plait.workers.wire_forms import Record


@dataclass(frozen=True)
class TellKnowledge(Record):
    """What this rank's engines have learned."""

    kind: ClassVar[str] = "tell-knowledge"
    role = ""

    @at_once
    def run(self, rank_state: RankState) -> KnowledgeTold:
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

    @staticmethod
    def result_of(message: Message) -> KnowledgeTold:
        return KnowledgeTold.of(message)


@dataclass(frozen=True)
class KnowledgeTold(Record):
    """An answer: of each role that drafts on the rank.

    notes: what of it is left out, in words
    """

    known: Sequence[Known]
    notes: Sequence[str]

    kind: ClassVar[str] = "knowledge-told"


@dataclass(frozen=True)
class TakeUpKnowledge(Record):
    """This rank's engines know what those before them had learned."""

    known: Sequence[Known]

    kind: ClassVar[str] = "take-up-knowledge"
    role = ""

    @at_once
    def run(self, rank_state: RankState) -> KnowledgeTaken:
        notes = []
        for role, role_state in rank_state.roles.items():
            engines = [engine for engine in self.known if engine.role == role]
            if role_state.engine is None or not engines:
                continue
            engines.sort(key=lambda engine: engine.instance)
            before = engines[_instance(rank_state, role) % len(engines)]
            why = before.circumstances.differs(_circumstances(rank_state, role))
            speculates = role_state.engine.speculates
            speculates.take_up(before.knowledge.elsewhere if why else before.knowledge)
            if why and speculates.counts is not None:
                notes.append(f"rank {rank_state.rank} learns again what steps of {role} take, as {why}")
        return KnowledgeTaken(notes)

    @staticmethod
    def result_of(message: Message) -> KnowledgeTaken:
        return KnowledgeTaken.of(message)


@dataclass(frozen=True)
class KnowledgeTaken(Record):
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

"""What engines have learned of drafts: each instance takes up what the one in its place knew, of its seconds what
still holds. No processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plait.generation.speculates import NoSpeculation
from plait.generation.speculator import Speculator
from plait.layout.mesh import Layout
from plait.speculation.drafter import PoolDrafter
from plait.speculation.pool import least_bytes
from plait.workers.draft_knowledge import DraftKnowledge
from plait.workers.knowledge_upkeep import KnowledgeTaken, KnowledgeTold, TakeUpKnowledge, TellKnowledge
from plait.workers.recorder import Recorder

TWO, TP2 = (Layout.on((0,)), Layout.on((1,))), (Layout.on((0, 1), tp=2),)


def rank_of(rank: int, layouts: tuple[Layout, ...], speculates: Any, dtype: str = "float32") -> Any:
    """A rank with an engine of an actor, and a critic, which does not generate."""
    recipe = SimpleNamespace(
        device="cpu", dtype=SimpleNamespace(value=dtype), sampling=SimpleNamespace(exact=False, draft_model=None)
    )
    layout = next(layout for layout in layouts if rank in layout.mesh.ranks)
    actor = SimpleNamespace(
        engine=SimpleNamespace(speculates=speculates),
        instance=SimpleNamespace(layout=layout),
        role_model=SimpleNamespace(name="tiny"),
    )
    return SimpleNamespace(
        rank=rank,
        recipe=recipe,
        roles={"actor": actor, "critic": SimpleNamespace(engine=None)},
        places={"actor": SimpleNamespace(generate=layouts)},
        cluster=SimpleNamespace(num_devices=2),
    )


def knowing(cell: int = 0) -> Speculator:
    """One that has seen a step of ten milliseconds, and a draft of a kind are accepted."""
    speculator = Speculator("adaptive", PoolDrafter(least_bytes()))
    speculator.speculation.ledger.quiet(1, 100, 0.01)
    speculator.speculation.acceptance.learn(np.array([cell]), np.array([1]))
    return speculator


def ignorant() -> Speculator:
    return Speculator("adaptive", PoolDrafter(least_bytes()))


class Announcer:
    """Asks ranks one after another, by messages."""

    def __init__(self, *ranks: Any) -> None:
        self.ranks, self.recorder = ranks, Recorder()

    def ask(self, ranks: Any, command: Any, what: str) -> list[Any]:
        command = type(command).of(command.to_message())
        answers = [self.recorder.drain(command.run(self.ranks[rank])) for rank in ranks]
        return [command.result_of(answer.to_message()) for answer in answers]


def asked(*ranks: Any) -> DraftKnowledge:
    announcer: Any = Announcer(*ranks)
    return DraftKnowledge(announcer, len(ranks))


def hits(speculator: Speculator) -> list[int]:
    return speculator.speculation.acceptance.learned[1].nonzero()[0].tolist()


def test_each_instance_has_what_the_one_in_its_place_knew() -> None:
    known, _ = asked(*(rank_of(rank, TWO, knowing(rank)) for rank in (0, 1))).told()
    assert [(one.role, one.instance) for one in known] == [("actor", 0), ("actor", 1)]
    after = [ignorant(), ignorant()]
    assert asked(*(rank_of(rank, TWO, after[rank]) for rank in (0, 1))).take_up(known) == []
    assert [hits(one) for one in after] == [[0], [1]]
    assert all(one.speculation.cost.of(1, 100) == pytest.approx(0.01) for one in after)


def test_who_computes_otherwise_takes_up_acceptance_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two instances one rank of another plan drafts for both, and says what it learns anew; the other is told."""
    known, _ = asked(*(rank_of(rank, TWO, knowing(rank)) for rank in (0, 1))).told()
    drafts = ignorant()
    ranks = rank_of(0, TP2, drafts), rank_of(1, TP2, NoSpeculation())
    notes = asked(*ranks).take_up(known)
    assert notes == ["rank 0 learns again what steps of actor take, as `tp` was 1 and is 2"]
    assert hits(drafts) == [0]
    assert drafts.speculation.cost.num_steps == 0
    (note,) = asked(rank_of(0, TWO, ignorant(), "bfloat16")).take_up(known)
    assert note.endswith("`dtype` was float32 and is bfloat16")
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert f"`threads` was {threads} and is {threads + 1}" in asked(rank_of(0, TWO, ignorant())).take_up(known)[0]


def test_who_drafts_nothing_or_a_fixed_length_has_learned_nothing() -> None:
    fixed = Speculator(4, PoolDrafter(least_bytes()))
    assert asked(rank_of(0, TWO, NoSpeculation()), rank_of(1, TWO, fixed)).told() == ([], [])
    known, _ = asked(rank_of(0, TWO, knowing())).told()
    assert asked(rank_of(0, TWO, NoSpeculation()), rank_of(1, TWO, fixed)).take_up(known) == []
    assert hits(fixed) == []


def test_what_does_not_fit_is_left_out_and_said() -> None:
    """Seconds of a clock that went back, say."""
    broken = knowing(0)
    broken.speculation.due.looking.took(-1.0)
    known, notes = asked(rank_of(0, TWO, broken), rank_of(1, TWO, knowing(1))).told()
    assert [one.instance for one in known] == [1]
    begins = "what rank 0 has learned of those of actor is not kept: `looking_s.0`: input should be greater than"
    assert [note.startswith(begins) for note in notes] == [True]


def test_answers_travel() -> None:
    known, _ = asked(rank_of(0, TWO, knowing())).told()
    assert TellKnowledge.result_of(KnowledgeTold(known, ["a note"]).to_message()) == KnowledgeTold(known, ["a note"])
    assert TakeUpKnowledge.result_of(KnowledgeTaken(["a note"]).to_message()).notes == ["a note"]

"""What was learned of drafts stands beside a checkpoint that is whole without it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.errors import DataError
from plait.runtime.steps.draft_knowledge import NAME, read_known, take_up_knowledge, writing_parts
from plait.speculation.drafter import PoolDrafter
from plait.speculation.knowledge import Circumstances, Known, knowledge_of
from plait.speculation.pool import least_bytes
from plait.speculation.speculation import Speculation

CIRCUMSTANCES = Circumstances(
    machine="a", device="cpu", ranks=1, threads=1, dtype="float32", exact=False, model="m", draft_model=None, tp=1, pp=1
)


def recipe_of(speculation: str | int = "adaptive") -> Any:
    return SimpleNamespace(sampling=SimpleNamespace(speculation=speculation))


def known() -> Known:
    speculation = Speculation("adaptive", PoolDrafter(least_bytes()), clock=lambda: 0.0)
    speculation.ledger.quiet(4, 100, 0.01)
    knowledge = knowledge_of(speculation)
    return Known(role="actor", instance=0, circumstances=CIRCUMSTANCES, knowledge=knowledge)


class Workers:
    """One rank, whose engine has learned something."""

    def __init__(self) -> None:
        self.checkpoint = SimpleNamespace(save=lambda folder: ({"masters": "its digest"}, {"counts": {}}))
        self.draft_knowledge = self
        self.taken: list[Any] = []

    def told(self) -> tuple[list[Known], list[str]]:
        return [known()], ["that of rank 1 is not kept"]

    def take_up(self, known: list[Known]) -> list[str]:
        self.taken += known
        return ["rank 0 learns anew"]


def test_it_stands_beside_the_checkpoint_and_comes_back(tmp_path: Path) -> None:
    workers: Any = Workers()
    recipe, said = recipe_of(), []
    digests, added = writing_parts(workers, recipe, said.append)(tmp_path)
    assert (digests, added) == ({"masters": "its digest"}, {"counts": {}}), "the manifest has nothing of it"
    take_up_knowledge(workers, recipe, tmp_path, said.append)
    assert workers.taken == [known()]
    begins = "speculative decoding: "
    assert said == [f"{begins}that of rank 1 is not kept", f"{begins}rank 0 learns anew"]


@pytest.mark.parametrize("speculation", ["off", 4])
def test_where_nothing_is_learned_nothing_is_kept(tmp_path: Path, speculation: str | int) -> None:
    workers: Any = Workers()
    recipe = recipe_of(speculation)
    writing_parts(workers, recipe, workers.taken.append)(tmp_path)
    take_up_knowledge(workers, recipe, tmp_path, workers.taken.append)
    assert not workers.taken
    assert not list(tmp_path.iterdir())


def test_what_is_gone_or_damaged_is_said_and_passed_over(tmp_path: Path) -> None:
    workers: Any = Workers()
    recipe, path, said = recipe_of(), tmp_path / NAME, []
    take_up_knowledge(workers, recipe, tmp_path, said.append)
    writing_parts(workers, recipe, [].append)(tmp_path)
    whole = json.loads(path.read_text())
    of_actor = whole["engines"][0]
    path.write_text(json.dumps(whole)[:100])
    take_up_knowledge(workers, recipe, tmp_path, said.append)
    path.write_text(json.dumps(whole | {"version": 2}))
    take_up_knowledge(workers, recipe, tmp_path, said.append)
    path.write_text(json.dumps(whole | {"engines": [of_actor | {"role": 3}]}))
    take_up_knowledge(workers, recipe, tmp_path, said.append)
    path.write_text(json.dumps(whole | {"engines": None}))
    with pytest.raises(DataError, match="expected a list under `engines`, found None"):
        read_known(path)
    assert not workers.taken
    begins = "speculative decoding: what was learned about draft tokens is lost, and learned again: "
    assert all(line.startswith(begins) for line in said)
    ends = ("No such file or directory", "text that does not parse", "version 1, found 2", "`role`: expected a text")
    assert [end in line for end, line in zip(ends, said, strict=True)] == [True] * 4, said

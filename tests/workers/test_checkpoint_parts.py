"""A checkpoint of several ranks: who is asked for its part, and what becomes of the answers. No processes."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.errors import RunError
from plait.models.files.finite import Broken
from plait.models.files.tensor_file import FileDigest
from plait.schedule.work import Work
from plait.workers.checkpoint_parts import CheckpointParts
from plait.workers.recorder import Recorder
from plait.workers.upkeep import Load, Save, Saved

COUNTS = {"applied_steps": 4, "attempted_steps": 5, "skipped_in_row": 1}


class Optimizers:
    """The leader's own: one role, whose part is a file of four bytes."""

    def __init__(self, broken: list[Broken]) -> None:
        self.broken = broken
        self.loaded: list[tuple[Path, Any]] = []

    def saving(self, folder: Path) -> Work[tuple[dict[str, Any], dict[str, FileDigest], list[Broken]]]:
        (folder / "actor.masters-00000").write_bytes(b"mine")
        return {"actor": COUNTS}, {"actor.masters-00000": FileDigest(4, zlib.crc32(b"mine"))}, list(self.broken)
        yield

    def loading(self, folder: Path, counts: Any) -> Work[None]:
        self.loaded.append((folder, counts))
        return
        yield


class Leader:
    """An announcer that keeps what is told, and gives each rank's answer."""

    def __init__(self, answers: dict[int, Saved], broken: list[Broken]) -> None:
        self.recorder, self.answers = Recorder(), answers
        places = {"actor": SimpleNamespace(train=object()), "ref": SimpleNamespace(train=None)}
        self.rank_state = SimpleNamespace(optimizers=Optimizers(broken), places=places)
        self.said: list[Any] = []
        self.fresh = self

    def ask(self, ranks: tuple[int, ...], command: Save, what: str) -> list[Saved]:
        self.said.append((ranks, command))
        assert what == "its part of the checkpoint"
        own = self.recorder.drain(command.run(self.rank_state))  # type: ignore[arg-type]
        return [own, *(command.result_of(answer.to_message()) for _, answer in sorted(self.answers.items()))]

    def tell(self, ranks: tuple[int, ...], command: Load) -> Load:
        self.said.append((ranks, command))
        return command

    def do(self, told: Load) -> None:
        self.recorder.drain(told.run(self.rank_state))  # type: ignore[arg-type]

    def trained(self, role: str) -> None:
        self.said.append(f"trained {role}")

    def sync_weights(self, role: str) -> None:
        self.said.append(f"sync {role}")

    def sync_references(self, share: float | None) -> None:
        self.said.append(f"references {share}")


def parts_of(num_ranks: int, answers: dict[int, Saved], *broken: Broken) -> tuple[CheckpointParts, Leader]:
    leader = Leader(answers, list(broken))
    announcer: Any = leader
    return CheckpointParts(announcer, num_ranks), leader


def test_counts_of_all_ranks_and_digests_of_all_files_come_back(tmp_path: Path) -> None:
    theirs = {"critic.masters-00001": FileDigest(9, zlib.crc32(b"another's"))}
    answers = {1: Saved({"critic": COUNTS}, theirs, []), 2: Saved({}, {}, [])}
    parts, leader = parts_of(3, answers)
    (tmp_path / "critic.masters-00001").write_bytes(b"another's")
    digests, state = parts.save(tmp_path)
    assert leader.said == [((0, 1, 2), Save(str(tmp_path)))]
    assert state == {"counts": {"actor": COUNTS, "critic": COUNTS}}
    assert digests == {
        "actor.masters-00000": FileDigest(4, zlib.crc32(b"mine")),
        "critic.masters-00001": FileDigest(9, zlib.crc32(b"another's")),
    }


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({}, "expected 9 bytes, as a rank wrote, found no file"),
        ({"critic.masters-00001": b"anothe"}, "expected 9 bytes, as a rank wrote, found 6"),
    ],
)
def test_what_ranks_wrote_must_be_what_the_leader_finds(tmp_path: Path, there: dict[str, bytes], said: str) -> None:
    answers = {1: Saved({}, {"critic.masters-00001": FileDigest(9, 0)}, [])}
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=f"{said}; all nodes must see one `run_dir`"):
        parts_of(2, answers)[0].save(tmp_path)


def test_what_is_not_finite_on_any_rank_is_named_once_with_all_its_pieces(tmp_path: Path) -> None:
    broken = [Broken("actor.masters of norm", 2, 8), Broken("actor.exp_avg of norm", 1, 8)]
    answers = {1: Saved({}, {}, broken)}
    parts, _ = parts_of(2, answers, Broken("actor.masters of norm", 1, 8))
    with pytest.raises(RunError) as caught:
        parts.save(tmp_path)
    assert str(caught.value).startswith(
        "2 tensors are not finite: actor.masters of norm (3 of 16 elements), actor.exp_avg of norm (1 of 8 elements), "
        "so it is not saved"
    )


def test_after_loading_weights_go_where_they_are_used_and_references_follow(tmp_path: Path) -> None:
    parts, leader = parts_of(2, {})
    parts.load(tmp_path, {"actor": COUNTS}, torch.get_num_threads())
    assert leader.said == [
        ((0, 1), Load(str(tmp_path), {"actor": COUNTS}, torch.get_num_threads())),
        "trained actor",
        "sync actor",
        "references None",
    ]
    assert leader.rank_state.optimizers.loaded == [(tmp_path, {"actor": COUNTS})]

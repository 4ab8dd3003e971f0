from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.errors import DataError
from plait.policy.migration import STEPS_OF_A_MOVE
from plait.runtime.folder.decisions import Decisions, Experience, response_lengths


@pytest.mark.parametrize("named", [True, False])
def test_lengths_are_those_of_one_rollout(tmp_path: Path, named: bool) -> None:
    """A resumed run must know what the run knew: of ReMax's two rollouts it hears the first alone."""
    file = tmp_path / "step-1.jsonl"
    rows = [{"rollout": "actor.generate", "token_ids": [1, 2, 3]}, {"rollout": "actor.generate", "token_ids": [4]}]
    if named:
        rows.append({"rollout": "actor.generate#2", "token_ids": [5, 6]})
    else:
        rows = [{"token_ids": row["token_ids"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert response_lengths(file, "actor.generate") == [3, 1]


def test_what_moves_take_is_what_the_last_one_took(tmp_path: Path) -> None:
    """Before any was made two decode steps; of those that were made the last, also in a run that is resumed."""
    file = tmp_path / "fusion.jsonl"
    run = Experience(file)
    assert run.move_s(0.1) == pytest.approx(0.1 * STEPS_OF_A_MOVE)
    for step, move_s in enumerate((0.7, 0.3, None), start=1):
        run.keep((step, "actor.generate"), {"seen": None, "move_s": move_s}, move_s)
    assert run.move_s(0.1) == 0.3
    assert Experience(file).move_s(0.1) == 0.3


@pytest.mark.parametrize("row", ['{"call": "actor.generate"}', '{"step": [], "call": "a"}'])
def test_a_row_that_is_none_is_damaged(tmp_path: Path, row: str) -> None:
    (tmp_path / "fusion.jsonl").write_text(row + "\n")
    with pytest.raises(DataError, match=r"fusion\.jsonl is damaged: expected `step` and `call` in every row"):
        Decisions(tmp_path / "fusion.jsonl")


def test_lengths_before_a_step_are_the_same_in_a_run_that_is_resumed(tmp_path: Path) -> None:
    """With a lag of one, step 6 knows steps 1 to 4, whether all of them were heard or read again."""
    heard = Experience(tmp_path / "a.jsonl", lag=1)
    for step in range(6):
        heard.heard([step, 10 * step])
    resumed = Experience(tmp_path / "b.jsonl", [[step, 10 * step] for step in range(1, 6)], step=6, lag=1)
    assert heard.lengths_before(6) == resumed.lengths_before(6) == [(1, 10), (2, 20), (3, 30), (4, 40)]
    assert heard.lengths_before(0) == []
    assert heard.lengths == resumed.lengths

"""Files that commands are asked to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cli import main
from plait.output import RUN_LOCK


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("no/such.json", "--out: expected a file in an existing folder, found"),
        (".", "is a folder, expected a file; give another name"),
        ("run/recipe.yaml", "belongs to the run in"),
    ],
)
@pytest.mark.parametrize("command", ["profile --quick", "schedule --stages 2 --microbatches 2"])
def test_a_place_that_may_not_be_taken_is_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, place: str, said: str
) -> None:
    (tmp_path / "run").mkdir()
    for name in (RUN_LOCK, "recipe.yaml"):
        (tmp_path / "run" / name).touch()
    assert main([*command.split(), "--out", str(tmp_path / place), "--overwrite"]) == 2
    assert said in capsys.readouterr().err

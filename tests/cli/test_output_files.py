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


def test_what_lies_in_the_home_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In `--out=~/plan.json` no shell puts the home in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.json").write_text("precious")
    command = "schedule --stages 2 --microbatches 2 --engine 1f1b"
    assert main([*command.split(), "--out=~/mine.json"]) == 2
    assert f"error: --out: `{tmp_path}/mine.json` exists" in capsys.readouterr().err
    assert (tmp_path / "mine.json").read_text() == "precious"
    assert main([*command.split(), "--out=~/new.json"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "new.json"]

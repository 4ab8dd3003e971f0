"""Temporary folders: nothing stays, not even of a process that was killed, and none is removed that is in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from plait import temporary_folder
from plait.temporary_folder import TemporaryFolder

HOLDER = """
import sys, tempfile, time
from plait.temporary_folder import TemporaryFolder
tempfile.tempdir = sys.argv[1]
with TemporaryFolder("eval") as folder:
    (folder.path / "actions").touch()
    print(folder.path, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_it_is_gone_with_all_that_is_in_it() -> None:
    with TemporaryFolder("eval") as folder:
        (folder.path / "actions").touch()
        assert folder.path.name.startswith("plait.eval.")
        assert folder.path.stat().st_mode & 0o777 == 0o700
    assert not folder.path.exists()
    folder.close()


def test_what_a_killed_process_has_left_goes_when_the_next_begins_and_no_other(place: Path) -> None:
    (place / "plait.eval").mkdir()
    (place / "plait.eval.linked").symlink_to(place / "plait.eval")
    command = [sys.executable, "-c", HOLDER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        try:
            with TemporaryFolder("eval"), TemporaryFolder("node"):
                assert (left / "actions").exists(), "its process goes on"
            process.send_signal(signal.SIGKILL)
            process.wait()
        finally:
            process.kill()
    assert (left / "actions").exists()
    with TemporaryFolder("node"):
        assert left.exists(), "that is for another purpose"
    with TemporaryFolder("eval") as other:
        assert not left.exists()
        assert set(names(place)) == {"plait.eval", "plait.eval.linked", other.path.name}


def test_a_folder_that_another_process_takes_away_before_it_is_held_is_made_anew(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    mkdtemp = tempfile.mkdtemp

    def taken_first(**options: str) -> str:
        made.append(mkdtemp(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(temporary_folder.tempfile, "mkdtemp", taken_first)
    with TemporaryFolder("eval") as folder:
        assert names(place) == [folder.path.name]
    assert len(made) == 2

"""One process at a time at a file: nobody waits without an end, nor in silence."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from plait import file_lock
from plait.file_lock import StillHeld, alone_at


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.lock"


def test_who_waits_says_so_once_and_gives_up_at_its_deadline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "SAID_AFTER_S", 0.02)
    said: list[str] = []
    me = rf"process {os.getpid()} on \S+"
    with (
        alone_at(path, 0),
        pytest.raises(StillHeld, match=rf"{me} has had {path} for 0\.1 s; end it, or"),
        alone_at(path, 0.1, said.append),
    ):
        raise AssertionError("two are alone")
    assert len(said) == 1
    with alone_at(path, 0):
        pass


def test_who_lets_go_in_time_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(file_lock.time, "sleep", lambda seconds: os.close(held))
    with alone_at(path, 1), open(path) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_file_that_was_removed_as_it_was_opened_is_opened_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, tries = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not tries:
            path.unlink()
        tries.append(operation)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with alone_at(path, 1):
        assert path.exists()
    assert len(tries) == 2


def test_where_files_cannot_be_locked_nobody_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with alone_at(path, 0), alone_at(path, 0):
        pass

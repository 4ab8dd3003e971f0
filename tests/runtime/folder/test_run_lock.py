"""The lock of a run's folder: who asks whether it is held keeps no run from beginning."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.runtime.folder import run_lock
from plait.runtime.folder.run_lock import Lock, worker_at


def test_a_run_that_begins_while_somebody_asks_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = os.open(tmp_path / "run.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(looks, fcntl.LOCK_SH)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            os.close(looks)

    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    lock = Lock(tmp_path)
    assert len(waited) == 3
    assert worker_at(tmp_path) is not None
    lock.release()
    assert worker_at(tmp_path) is None


def test_who_works_there_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(run_lock.time, "sleep")
    lock = Lock(tmp_path)
    with pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()} on \S+; wait for it, end it, or"):
        Lock(tmp_path)
    lock.release()


def test_who_shares_the_lock_for_good_is_not_waited_for_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "TRIES_S", 0.05)
    with open(tmp_path / "run.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="is in use by another process; wait for it"):
            Lock(tmp_path)


def test_a_lock_file_that_was_removed_as_it_was_opened_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a command that left without a run: whoever comes next would lock another file."""
    flock, tries = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not tries:
            (tmp_path / "run.lock").unlink()
        tries.append(operation)
        flock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        lock = Lock(tmp_path)
    assert worker_at(tmp_path) is not None
    lock.release()

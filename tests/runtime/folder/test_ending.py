"""How a run ended, as its folder tells it: by hand, and of processes that really were at it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from plait.errors import RESUME, RunError
from plait.runtime.folder import ending
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.ending import end_noted, said_of_end
from plait.runtime.folder.history import History
from plait.runtime.folder.run_lock import Lock

KILLED = (
    "the run was killed: its process is gone and wrote no reason (SIGKILL, out of memory, a power cut, a full disk)"
)


def stay(**known: Any) -> dict[str, Any]:
    """One that has begun at step 0 and saved the second."""
    return {"ended": None, "how": None, "from_step": 0, "to_step": 2, "code": [], **known}


def ended(**known: Any) -> dict[str, Any]:
    return stay(ended="2026-01-01T00:00:00+00:00", **known)


def write(folder: Path, *stays: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    record = {"format": "plait-run", "version": 1, "saved_step": 2, "stays": stays}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("newest", "said"),
    [
        (ended(how="finished"), "the run finished after step 2"),
        (ended(how="stopped"), f"the run was stopped after step 2, as was asked; go on with {RESUME}"),
        (ended(how="RunError: the disk is full"), "the run ended after step 2: the disk is full"),
        (ended(how="RanksLost: node 1 is lost"), "the run ended after step 2: node 1 is lost"),
        (ended(how="KeyboardInterrupt: "), f"the run ended after step 2: left at once; go on with {RESUME}"),
        (
            stay(),
            f"{KILLED}; step 2 is the newest that is saved; go on with {RESUME}",
        ),
        (
            stay(to_step=0),
            f"{KILLED}; no step is saved; go on with {RESUME}",
        ),
    ],
    ids=["finished", "stopped", "failed", "lost", "left", "killed", "killed before it has saved"],
)
def test_the_newest_stay_says_how_it_ended(tmp_path: Path, newest: dict[str, Any], said: str) -> None:
    assert said_of_end(write(tmp_path / "run", ended(how="RunError: earlier"), newest)) == said


def test_who_holds_the_folder_is_at_it_whatever_was_before(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ended(how="RunError: earlier"))
    lock = Lock(folder)
    said = said_of_end(folder)
    lock.release()
    assert said is not None
    assert said.startswith(f"the run goes on: process {os.getpid()} on ")
    assert said_of_end(folder) == "the run ended after step 2: earlier"
    Lock(folder).release()  # to look has not kept it


@pytest.mark.parametrize("begins", [True, False], ids=["begins", "ends"])
def test_a_run_that_begins_or_ends_while_it_is_looked_at_is_not_said_to_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, begins: bool
) -> None:
    """As its history is read: the stay has begun in it, and has no end yet."""
    folder = write(tmp_path / "run", stay())
    locks = [] if begins else [Lock(folder)]

    def late(path: Path, *, resume: bool) -> History:
        history = History(path, resume=resume)
        if begins:
            locks.append(Lock(folder))
        else:
            locks[0].release()
        return history

    monkeypatch.setattr(ending, "History", late)
    said = said_of_end(folder)
    assert said is not None
    assert said.startswith(f"the run goes on: process {os.getpid()} on ")


def test_a_folder_that_tells_nothing(tmp_path: Path) -> None:
    assert said_of_end(tmp_path) is None
    assert said_of_end(write(tmp_path / "run")) is None
    (tmp_path / "run.json").write_text("{")
    said = said_of_end(tmp_path)
    assert said is not None
    assert said.startswith(f"how the run ended is not known: {tmp_path}/run.json: expected a run in JSON")
    said = said_of_end(write(tmp_path, ended(how=7)))
    assert said is not None
    assert said.startswith(f"how the run ended is not known: {tmp_path}/run.json: expected the stays of a run")


def fails(directory: RunDirectory, why: str, *stays: dict[str, Any]) -> list[Any]:
    """How each stay ended of a run that somebody watches; what its processes wrote before the error came."""

    def work() -> None:
        with end_noted(directory):
            if stays:
                write(directory.path, *stays)
            raise RunError(why)

    with pytest.raises(RunError, match=why):
        work()
    return [each["how"] for each in History(directory.path, resume=True).stays]


def test_who_watches_notes_the_end_that_a_process_could_not_write_or_know(tmp_path: Path) -> None:
    """The stay before, which was killed too, stays as it is."""
    folder = write(tmp_path / "run", stay())
    for name in ("recipe.yaml", "run.lock"):
        (folder / name).touch()
    directory = RunDirectory.resume(folder)
    assert fails(directory, "before the stay had begun") == [None]
    assert fails(directory, "rank 0 was killed", stay(), stay(from_step=1)) == [None, "RunError: rank 0 was killed"]
    newest = History(folder, resume=True).stays[-1]
    assert newest["ended"] is not None
    assert newest["to_step"] == 2
    waited = ended(how="RunError: waited in vain for rank 1", to_step=3)
    told = fails(directory, "rank 1 was killed", stay(), stay(), waited)
    assert told == [None, None, "RunError: rank 1 was killed"], "what came first"
    assert History(folder, resume=True).stays[-1]["to_step"] == 3
    told = fails(directory, "a rank failed as it left", stay(), stay(), stay(), ended(how="finished"))
    assert told == [None, None, None, "finished"]
    directory.close()

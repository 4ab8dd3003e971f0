"""How the newest stay at a run ended, as its folder tells: read from RUN_DIR/run.json and the lock on the folder."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from plait.errors import RESUME, DataError
from plait.file_lock import holder_of
from plait.output import RUN_LOCK
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.history import FINISHED, STOPPED, History


def said_of_end(folder: Path) -> str | None:
    """How the newest stay at the run in a folder ended, or that it has not, in words; None of a folder without one."""
    try:
        stays = History(folder, resume=True).stays
    except DataError as error:
        return f"how the run ended is not known: {error}"
    if not stays:
        return None
    how, step = stays[-1].get("how"), stays[-1].get("to_step")
    if (holder := _at_work(folder / RUN_LOCK)) is not None:
        return f"the run goes on: {holder} is at it"
    if how == FINISHED:
        return f"the run finished after step {step}"
    if how == STOPPED:
        return f"the run was stopped after step {step}, as was asked; go on with {RESUME}"
    if how is not None:
        said = how.removeprefix("RunError: ").removeprefix("KeyboardInterrupt: ")  # which tell all there is to know
        return f"the run ended after step {step}: {said}"
    return (
        f"the run was killed: its process is gone and wrote no reason (SIGKILL, want of memory, a power cut); "
        f"{f'step {step} is the newest that is saved' if step else 'no step is saved'}; go on with {RESUME}"
    )


@contextlib.contextmanager
def end_noted(directory: RunDirectory) -> Iterator[None]:
    """For who watches the processes of a stay: the error that comes through is noted as its end, where its own process
    could not."""
    before = _num_stays(directory)
    try:
        yield
    except BaseException as error:
        directory.note_begun()
        if _num_stays(directory) > before:
            History(directory.path, resume=True).end(f"{type(error).__name__}: {error}")
        raise


def _num_stays(directory: RunDirectory) -> int:
    """How many stays the run in a folder has; 0 where it holds none yet, or its history cannot be read."""
    with contextlib.suppress(DataError):
        return len(History(directory.path, resume=True).stays) if directory.begun else 0
    return 0


def _at_work(lock: Path) -> str | None:
    """Who holds the lock of a run; None: nobody."""
    with contextlib.suppress(OSError), open(lock, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment, until it is closed
        except BlockingIOError:
            return holder_of(file.fileno())
    return None

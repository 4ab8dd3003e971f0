"""How the newest stay at a run ended, as its folder tells: read from RUN_DIR/run.json and the lock on the folder."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from plait.errors import RESUME, DataError
from plait.runtime.folder.directory import RunDirectory
from plait.runtime.folder.history import FINISHED, HISTORY, STOPPED, History
from plait.runtime.folder.run_lock import worker_at

_OF_OURS = re.compile(r"^(RunError|RanksLost|KeyboardInterrupt|ConfigError|DataError|ModelError|FlowError): ")
"""Kinds of errors whose message says all there is to know."""


def said_of_end(folder: Path) -> str | None:
    """How the newest stay at the run in a folder ended, or that it has not, in words; None of a folder without one."""
    worker = worker_at(folder)
    try:
        stays = History(folder, resume=True).stays
    except DataError as error:
        return f"how the run ended is not known: {error}"
    if not stays:
        return None
    if (worker := worker or worker_at(folder)) is not None:  # also one that ended, or began, while it was read
        return f"the run goes on: {worker} is at it"
    how, step = stays[-1].get("how"), stays[-1].get("to_step")
    if how == FINISHED:
        return f"the run finished after step {step}"
    if how == STOPPED:
        return f"the run was stopped after step {step}, as was asked; go on with {RESUME}"
    if how is not None:
        return f"the run ended after step {step}: {_OF_OURS.sub('', how) or f'left at once; go on with {RESUME}'}"
    return (
        "the run was killed: its process is gone and wrote no reason (SIGKILL, out of memory, a power cut, a full "
        f"disk); {f'step {step} is the newest that is saved' if step else 'no step is saved'}; go on with {RESUME}"
    )


def ends_below(folder: Path) -> dict[Path, str]:
    """How each run ended that lies in a folder, such as those of the stages of a recipe: in the order in which they
    were begun."""
    said: dict[Path, str] = {}
    for run in sorted({path.parent for path in folder.glob(f"*/{HISTORY}")}, key=_begun):
        if (end := said_of_end(run)) is not None:
            said[run] = end
    return said


def _begun(folder: Path) -> tuple[str, str]:
    """When the run in a folder was begun, as its first stay tells, and its name; those that tell nothing come first."""
    with contextlib.suppress(DataError):
        if stays := History(folder, resume=True).stays:
            return str(stays[0].get("started", "")), folder.name
    return "", folder.name


@contextlib.contextmanager
def end_noted(directory: RunDirectory) -> Iterator[None]:
    """For who watches the processes of a stay: the error that comes through is noted as its end. Its own process may
    have been killed, or know but that it waited in vain for one that was."""
    before = _num_stays(directory)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(DataError, OSError):  # the error that came through is the one to go on up
            directory.note_begun()
            if _num_stays(directory) > before:
                History(directory.path, resume=True).end(f"{type(error).__name__}: {error}")
        raise


def _num_stays(directory: RunDirectory) -> int:
    """How many stays the run in a folder has; 0 where it holds none yet, or its history cannot be read."""
    with contextlib.suppress(DataError):
        return len(History(directory.path, resume=True).stays) if directory.begun else 0
    return 0

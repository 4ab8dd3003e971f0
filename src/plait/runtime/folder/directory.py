"""The directory of a run: who holds it, how it is begun, cleared, and cut back for a resumed run."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from plait.errors import RESUME, ConfigError, RunError
from plait.file_writes import why_not_written
from plait.observe.run_log import cut_after, truncate_to
from plait.observe.trace import last_step_behind
from plait.output import RUN_LOCK, write_file
from plait.recipes.stages import FINAL, MERGED
from plait.runtime.folder.history import CODE, HISTORY
from plait.runtime.folder.run_files import (
    BEST,
    CHECKPOINTS,
    DECISIONS,
    DOCTOR,
    EVALUATIONS,
    FORECAST,
    METRICS,
    OLD_WORKERS,
    PLAN,
    RECIPE,
    SAMPLES,
    SUMMARY,
    TRACE,
    WORKERS,
    RunFiles,
)
from plait.runtime.folder.run_lock import Lent, Lock
from plait.runtime.folder.unsaved import nothing_saved, said_of_taken

_LOGS = (METRICS, TRACE)
"""Files that grow row by row; a checkpoint states how long each was."""
_LOGGED = (METRICS, EVALUATIONS, DOCTOR, TRACE, SAMPLES, "tensorboard", "wandb")
_RUN = (RECIPE, PLAN, CHECKPOINTS, *_LOGGED, BEST, FINAL, MERGED, HISTORY, CODE, SUMMARY, FORECAST, *DECISIONS)
_CLEARED = (*_RUN, OLD_WORKERS)
"""What `overwrite` removes, in this order: without a recipe nothing can be resumed by mistake half-way."""
BEFORE_ALL = -1
"""The step before the evaluation of step 0."""
_STEP_FILE = re.compile(r"\.?(?:step|eval)-(\d+)\b.*")


class RunDirectory:
    """A run's directory, held by this process until `close`. Made by `claim`, `create` or `resume`."""

    def __init__(self, path: Path, lock: Lock | Lent, *, begun: bool, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self.files = RunFiles(path)
        self._lock = lock
        self._begun = begun
        self._made = made
        """Folders that `claim` made, the innermost first."""
        self._old_output_bytes = self.files.reward_output.stat().st_size if self.files.reward_output.exists() else None
        self._old_recipe = _identity(self.files.recipe)
        self._holder = _text(path / RUN_LOCK)

    @classmethod
    def claim(cls, path: str | Path, *, overwrite: bool = False) -> RunDirectory:
        """Take `path` for a new run; an earlier run's files stay as they are until `begin`.

        Closed without `begin`, it leaves the place as it was found.

        Raises:
            ConfigError: the folder is not empty, is no run directory, holds a run and `overwrite`
                is off, lies in what another run clears, is held by another process, or cannot be written; names
                the keys `run_dir` and `overwrite`, and RESUME.
        """
        path = Path(path)
        try:
            if path.is_file():
                raise ConfigError(f"key `run_dir`: {path} is a file; give a folder that is new or empty")
            _check_outside(path)
            made = tuple(folder for folder in (path, *path.parents) if not folder.exists())
            path.mkdir(parents=True, exist_ok=True)
            names = _names(path)
            if names and RUN_LOCK not in names:
                raise ConfigError(
                    f"key `run_dir`: {path} is not empty and is no run directory of plait, so it is neither used nor "
                    "cleared; give a folder that is new or empty"
                )
            directory = cls(path, Lock(path), begun=False, made=made)
        except OSError as error:
            raise ConfigError(f"key `run_dir`: {path} cannot be written: {why_not_written(path, error)}") from error
        if not overwrite and (entries := [name for name in _RUN if name in _names(path)]):
            directory.close()
            said = said_of_taken(entries, is_unsaved=RECIPE in entries and nothing_saved(*directory.files.saved))
            raise ConfigError(f"key `run_dir`: {path} holds a run already {said}")
        return directory

    @classmethod
    def resume(cls, path: str | Path) -> RunDirectory:
        """Take up the run in `path`.

        Raises:
            ConfigError: there is no run, or another process holds it.
        """
        path = Path(path)
        try:
            if (path / RUN_LOCK).is_file():
                directory = cls(path, Lock(path), begun=True)
                if (path / RECIPE).is_file():
                    return directory
                directory.close()
            raise ConfigError(f"key `run_dir`: {path} holds no run to resume; leave {RESUME} out to begin one")
        except OSError as error:
            raise ConfigError(f"key `run_dir`: {path} cannot be written: {why_not_written(path, error)}") from error

    @classmethod
    def lent(cls, path: Path) -> RunDirectory:
        """For a process that writes in the place of the one that holds the directory, and outlives this."""
        return cls(path, Lent(), begun=(path / RECIPE).is_file())

    @property
    def begun(self) -> bool:
        """Whether there is a run in it that can be resumed."""
        return self._begun

    def begin_anew(self) -> None:
        """Take the run in it for one to be replaced, as `claim` with `overwrite` does: it stays until `begin`."""
        self._begun = False

    def note_begun(self) -> None:
        """Note that a run has begun, if another process that the folder was lent to has written a new recipe."""
        self._begun = self._begun or _identity(self.files.recipe) not in (None, self._old_recipe)

    def begin(self, recipe: str) -> None:
        """Clear what an earlier run wrote and store `recipe` (YAML), from which on the run can be resumed.

        Files that no run writes are left.

        Raises:
            ConfigError: the folder cannot be written.
        """
        self._begun = True
        try:
            self._clear()
            self._cut_output(self._old_output_bytes)
            write_file(self.files.recipe, recipe)
        except OSError as error:
            why = why_not_written(self.files.recipe, error)
            raise ConfigError(f"key `run_dir`: {self.path} cannot be written: {why}") from error

    def unbegin(self) -> None:
        """Take back `begin`, for a run that did not come to its start: the folder is free for another try."""
        with contextlib.suppress(OSError):
            self._clear()
        self._begun, self._old_output_bytes = False, None

    def check_in_place(self) -> None:
        """See that what is written goes to this run still.

        Raises:
            RunError: the folder was moved or removed, or another run has the place.
        """
        holder = _text(self.path / RUN_LOCK)
        if _is_gone(self.files.recipe) or holder not in (None, self._holder):
            raise RunError(
                f"{self.path} is no longer the folder of this run: it was moved or removed; put it back as it was and "
                f"go on with {RESUME}, or go on where it is now with --run_dir"
            )

    def offsets(self) -> dict[str, int]:
        """Force the logs to disk and return their lengths in bytes, for a checkpoint. Writers have flushed before.

        Evaluations are cut back by their step, so their log has no place among these.
        """
        lengths = {}
        for name in _LOGS:
            path = self.path / name
            if path.exists():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                    lengths[name] = os.fstat(file.fileno()).st_size
        return lengths

    def rollback_to(self, offsets: Mapping[str, int], step: int, *, is_over: bool = False) -> None:
        """Bring the logs back to where they were after `step` (0: before the first), as `offsets()` told then.

        A log that `offsets` does not name did not exist then and is removed; so are later steps' samples and
        evaluations. An evaluation of `step` itself stays: it is of the weights that the run goes on from.
        Call it with no log open.

        Args:
            step: BEFORE_ALL: the evaluation before the first step goes, too.
            is_over: `step` is the last one: the trace keeps the actions of the evaluation behind it.

        Raises:
            RunError: a log is shorter than it was.
        """
        assert set(offsets) <= set(_LOGS), f"offsets name {sorted(offsets)}, the logs are {_LOGS}"
        for name, offset in offsets.items():
            path = self.path / name
            if name == TRACE and is_over and path.exists() and last_step_behind(path, offset) <= step:
                offset = max(offset, path.stat().st_size)
            truncate_to(path, offset)
        for name in set(_LOGS) - set(offsets):
            (self.path / name).unlink(missing_ok=True)
        if self.files.evaluations.exists():
            cut_after(self.files.evaluations, step)
        if (self.path / SAMPLES).is_dir():
            for path in (self.path / SAMPLES).iterdir():
                match = _STEP_FILE.fullmatch(path.name)
                if match and (int(match.group(1)) > step or path.suffix == ".tmp"):
                    path.unlink()

    def close(self) -> None:
        """Let go of the directory; without `begin` nothing of this stay is left in it. May be called twice."""
        if self._begun or not self._lock.held:
            self._lock.release()
            return
        with contextlib.suppress(OSError):
            if self._old_output_bytes is None:
                self.files.reward_output.unlink(missing_ok=True)
            else:
                os.truncate(self.files.reward_output, self._old_output_bytes)
            if _names(self.path) <= {RUN_LOCK}:
                (self.path / RUN_LOCK).unlink()
        self._lock.release()
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _clear(self) -> None:
        # What ranks print is written now where it is they that clear.
        for name in (*_CLEARED, *([WORKERS] if self._lock.held else [])):
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)

    def _cut_output(self, old_bytes: int | None) -> None:
        """Cut the first bytes from the reward functions' output; those that write to it now have it open already."""
        if not old_bytes:
            return
        with open(self.files.reward_output, "r+b") as file:
            file.seek(old_bytes)
            new = file.read()
            file.truncate(0)
            file.seek(0)
            file.write(new)


def _check_outside(path: Path) -> None:
    """Raises ConfigError where a folder lies in what a run would clear, with all that is in it."""
    place = path.absolute()
    for run in place.parents:
        inside = place.relative_to(run).parts[0]
        if inside in _CLEARED and (run / RUN_LOCK).is_file():
            raise ConfigError(
                f"key `run_dir`: {path} lies in `{inside}` of the run in {run}, which is cleared with it; give a "
                "folder outside"
            )


def _identity(path: Path) -> tuple[int, int] | None:
    """Another one where a file was written anew; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _text(path: Path) -> bytes | None:
    """The contents of a file; None if it does not exist or cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def _is_gone(path: Path) -> bool:
    """Not where the system says something else than that: a file server may be away for a while."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}

"""What a command is asked to write: which place it may take, and how it appears there, whole or not at all.

A file or folder is written under another name beside its place, forced to disk, and renamed: whatever fails on the
way, what was there stays, and nothing else is left. Nothing is replaced unless the user says so (`--overwrite`), and
a folder only where an earlier export wrote all that is in it, which the marker that every export leaves there tells.

The folder of a run is recognised by its lock file, `RUN_LOCK`, which stays there as long as the folder does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

from plait.errors import ConfigError, DataError
from plait.file_form import FileForm
from plait.file_writes import why_not_written
from plait.paths import at_home

RUN_LOCK = "run.lock"
MARKER = "plait_export.json"
FORM = FileForm("export")


def run_holding(path: Path) -> Path | None:
    """The folder of a run that `path` is, or lies in; None where it lies in none."""
    path = _real(path)
    return next((folder for folder in (path, *path.parents) if os.path.isfile(folder / RUN_LOCK)), None)


def check_file(path: Path, option: str, *, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """See that a file may be written at `path`: it is not there, or is a file that `overwrite` lets go; and that its
    folder takes one.

    Args:
        option: that the path was given by, for messages.
        inputs: files that the command reads, which are never replaced.

    Raises:
        ConfigError: it exists; it is no plain file, is read by the command, or is one of a run's; nothing can be
            written there.
    """
    with _written(path, option, "file"):
        if os.path.lexists(path):
            _check_replaced(path, option, overwrite, inputs)
        _try_out(_real(path))


def _check_replaced(path: Path, option: str, overwrite: bool, inputs: Iterable[Path]) -> None:
    """Raises ConfigError where a file that exists may not be replaced."""
    if not path.is_file() and path.exists():
        raise ConfigError(f"{option}: `{path}` is {_kind(path)}, expected a file; give another name")
    if path.exists() and any(os.path.exists(other) and path.samefile(other) for other in inputs):
        raise ConfigError(f"{option}: `{path}` is what the command reads; give another file")
    if not overwrite:
        raise ConfigError(f"{option}: `{path}` exists; give another file, or --overwrite")
    if (run := run_holding(path)) is not None:
        raise ConfigError(f"{option}: `{path}` belongs to the run in `{run}` and is not replaced; give another file")


def check_folder(path: Path, option: str, *, overwrite: bool, inputs: Iterable[Path] = ()) -> None:
    """See that a folder may be written at `path`: it is not there, is empty, or holds what an export wrote and nothing
    else, which `overwrite` lets go.

    Args:
        option: that the path was given by, for messages.
        inputs: folders that the command reads; nothing is written into them or in their place.

    Raises:
        ConfigError: the folder exists, or would lie in a run or an input, or holds what no export wrote; nothing can be
            written there.
    """
    run = run_holding(path) or next(
        (folder for folder in map(_real, inputs) if folder in (_real(path), *_real(path).parents)), None
    )
    if run is not None:
        raise ConfigError(
            f"{option}: `{path}` is or lies in the run `{run}`, which is never replaced; give another folder"
        )
    with _written(path, option, "folder"):
        if os.path.lexists(path):
            _check_exported(path, option, overwrite)
        _try_out(_real(path))


def _check_exported(path: Path, option: str, overwrite: bool) -> None:
    """Raises ConfigError where something that exists may not be replaced by a folder."""
    if not path.is_dir():
        raise ConfigError(f"{option}: `{path}` is {_kind(path)}, expected a folder; give another name")
    names = {entry.name for entry in path.iterdir()}
    if not names:
        return
    if not overwrite:
        raise ConfigError(f"{option}: `{path}` exists; give another folder, or --overwrite")
    foreign = sorted(names - _exported(path))
    if foreign:
        raise ConfigError(
            f"{option}: `{path}` holds {', '.join(foreign[:3])}{' and more' * (len(foreign) > 3)}, which no "
            "`plait export` wrote; --overwrite replaces exported folders only: give another one, or remove it yourself"
        )


@contextlib.contextmanager
def _written(path: Path, option: str, what: str) -> Iterator[None]:
    """What the system says against a place is said of the option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{option}: `{path}` cannot be written: {why_not_written(path, error)}; give another {what}"
        ) from None


def _try_out(path: Path) -> None:
    """See that the nearest folder around `path` that there is takes a new file, and names as those that are to be made.

    Raises:
        OSError: it does not.
    """
    around = next(folder for folder in path.parents if os.path.lexists(folder))
    with tempfile.TemporaryFile(dir=around):
        for name in path.relative_to(around).parts:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(_unfinished(around / name))  # which may be too long


def write_file(path: str | Path, content: str | Iterable[bytes], *, durable: bool = True) -> None:
    """Put a file at `path`, whole or not at all; the folder is there already. A link stays one.

    Args:
        durable: force it to disk, so that it survives the machine's fall too.

    Raises:
        OSError: the disk is full or the place cannot be written; what was there stays.
    """
    path = _real(Path(path))
    unfinished = _unfinished(path)
    try:
        with open(unfinished, "wb") as file:
            file.writelines([content.encode()] if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def write_folder(folder: str | Path, write: Callable[[Path], None], *, marker: Mapping[str, Any] | None = None) -> None:
    """Let `write` fill a new folder, and put it in the place of `folder`.

    Args:
        marker: what the folder is, stored with the list of its files, so that a later export may replace it; None:
            none is left.

    Raises:
        OSError: the disk is full or the place cannot be written; what was there stays, and nothing is left beside it.
    """
    folder = _real(Path(folder))
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    work, old = _unfinished(folder), folder.with_name(f".{folder.name}.old")
    _recover(folder, old)
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir()
        write(work)
        if marker is not None:
            names = sorted(entry.name for entry in work.iterdir())
            record = {**FORM.head, **marker, "files": [*names, MARKER]}
            (work / MARKER).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        _share(work)
        for entry in work.iterdir():
            sync(entry)
        sync(work)
        _swap(work, folder, old)
    except BaseException:  # a full disk comes out of safetensors as an error of its own
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):
            for parent in made:
                parent.rmdir()
        raise
    sync(folder.parent)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _share(folder: Path) -> None:
    """Give the files of a new folder the rights that the umask gave it: libraries make some for their owner alone."""
    rights = folder.stat().st_mode & 0o666
    for entry in folder.iterdir():
        if entry.is_file():
            entry.chmod(rights)


def _swap(work: Path, folder: Path, old: Path) -> None:
    """Two renames; a process that is killed between them leaves `old`, which `_recover` puts back."""
    if not folder.exists():
        work.rename(folder)
        return
    try:
        folder.rename(old)
        work.rename(folder)
    finally:
        _recover(folder, old)  # a signal may raise behind either rename


def _recover(folder: Path, old: Path) -> None:
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _unfinished(path: Path) -> Path:
    """Where a file or folder is written before it is renamed to `path`."""
    return path.with_name(f".{path.name}.tmp")


def marked(folder: Path) -> Mapping[str, Any]:
    """What the marker of a folder says (`write_folder`); nothing where it has none that can be read."""
    path = folder / MARKER
    try:
        return FORM.read(path)
    except DataError:
        return {}


def _exported(folder: Path) -> set[str]:
    """Names in a folder that its marker says an export wrote."""
    names = marked(folder).get("files")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _real(path: Path) -> Path:
    """Where a path leads, through links; one that leads round stands as it is."""
    return Path(os.path.realpath(path))


def _kind(path: Path) -> str:
    return "a folder" if path.is_dir() else "a file" if path.is_file() else "no plain file or folder"


class Filed(Protocol):
    """Base of values that have a file form of their own, by which users keep them."""

    form: ClassVar[FileForm]

    def to_json(self) -> str:
        """The file form, with a version."""
        ...

    @classmethod
    def from_json(cls, text: str, name: str) -> Self:
        """Read the file form; `name` is for messages. Raises `DataError`."""
        ...

    def save(self, path: str | Path) -> None:
        """Write the file form.

        Raises:
            ConfigError: as of `paths.at_home`.
            OSError: it cannot be written.
        """
        write_file(at_home(path, self.form.what), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file form.

        Raises:
            ConfigError: as of `paths.at_home`.
            DataError: it cannot be read, or holds no such value.
        """
        return cls.from_json(cls.form.text_of(at_home(path, cls.form.what)), str(path))

"""The key of a run on several machines: from a variable of all commands, or from a file in the shared run folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from plait.errors import ConfigError
from plait.file_lock import NO_LOCKS, is_taken

VARIABLE = "PLAIT_RUN_KEY"
FILE = "nodes.key"
_LEAST_CHARACTERS = 16


def from_variable(environ: Mapping[str, str]) -> bytes | None:
    """The key that the variable says; None where it is not set.

    Raises:
        ConfigError: it is too short to be secret.
    """
    text = environ.get(VARIABLE)
    if text is None:
        return None
    if len(text) < _LEAST_CHARACTERS:
        raise ConfigError(
            f"the variable {VARIABLE}: expected at least {_LEAST_CHARACTERS} characters that nobody can guess, found "
            f"{len(text)}; make one with `openssl rand -hex 32`"
        )
    return hashlib.sha256(text.encode()).digest()


@contextlib.contextmanager
def leaders_key(folder: Path, environ: Mapping[str, str]) -> Iterator[bytes]:
    """The key for a run that begins: that of the variable, else a new one, in a file of `folder` while inside. The file
    of a leader that was killed is replaced: who leads has the lock of its file.

    Raises:
        ConfigError: the file is that of another leader, who is there.
    """
    key = from_variable(environ)
    if key is not None:
        yield key
        return
    path, text = folder / FILE, secrets.token_hex(32)
    _remove_stale(path)
    with contextlib.ExitStack() as stack:
        file = _taken(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stack)
        stack.callback(path.unlink, missing_ok=True)
        os.write(file, text.encode())
        os.fsync(file)
        yield hashlib.sha256(text.encode()).digest()


def _remove_stale(path: Path) -> None:
    """Remove the file of a leader that is there no more. Raises ConfigError where it is there."""
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
        _taken(path, os.O_WRONLY, stack)
        path.unlink()


def _taken(path: Path, flags: int, stack: contextlib.ExitStack) -> int:
    """The file, opened and locked until the stack ends. Raises ConfigError where another leader has it, as one that
    begins at the same time may."""
    with contextlib.suppress(FileExistsError):
        file = os.open(path, flags, 0o600)
        stack.callback(os.close, file)
        if _lock(file, path):
            return file
    raise ConfigError(
        f"another command leads a run in this folder, and has its key in {path}; end it, wait for it, or give another "
        "`run_dir`"
    )


def _lock(file: int, path: Path) -> bool:
    """Whether nobody else has the lock of the file; where files cannot be locked it is taken that nobody has."""
    try:
        return is_taken(file, path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return True


def nodes_key(folder: Path, environ: Mapping[str, str]) -> bytes | None:
    """The key of a run that another node leads; None while there is none.

    Raises:
        ConfigError: the variable is no key, or others may read the file.
    """
    if (key := from_variable(environ)) is not None:
        return key
    path = folder / FILE
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(1000)
    except OSError:
        return None
    if mode & 0o077:
        raise ConfigError(
            f"the key of the run, {path}, may be read by others (mode {mode:o}); keep `run_dir` on a file system that "
            f"supports file modes, or set {VARIABLE} on all nodes"
        )
    return hashlib.sha256(text).digest() if text else None

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
    """The key for a run that begins: that of the variable, else a new one, in a file of `folder` while inside."""
    key = from_variable(environ)
    if key is not None:
        yield key
        return
    path, text = folder / FILE, secrets.token_hex(32)
    path.unlink(missing_ok=True)  # of a run that was killed
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(file, text.encode())
        os.fsync(file)
    finally:
        os.close(file)
    try:
        yield hashlib.sha256(text.encode()).digest()
    finally:
        path.unlink(missing_ok=True)


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
            f"knows modes, or set {VARIABLE} on all nodes"
        )
    return hashlib.sha256(text).digest() if text else None

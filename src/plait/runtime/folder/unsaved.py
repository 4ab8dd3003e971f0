"""Runs of which nothing is saved: one may begin again in such a folder, by whatever recipe, and nothing is lost."""

from __future__ import annotations

from plait.checkpoint.step_folders import steps_in
from plait.errors import DataError
from plait.runtime.folder.history import History
from plait.runtime.folder.run_files import RunFiles


def nothing_saved(files: RunFiles) -> bool:
    """Whether no step of a run was ever saved, as far as its folder says it. One whose `run.json` is damaged may have
    had some."""
    if steps_in(files.checkpoints) or files.best.exists() or files.final.exists():
        return False
    try:
        return History(files.path, resume=True).saved_step == 0
    except DataError:
        return False

"""Runs of which nothing is saved: one may begin again in such a folder, by whatever recipe, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait.checkpoint.step_folders import steps_in
from plait.errors import RESUME, DataError
from plait.runtime.folder.history import History


def nothing_saved(folder: Path, checkpoints: Path, *weights: Path) -> bool:
    """Whether no step of a run was ever saved, as far as its folder says it. One whose `run.json` is damaged may have
    had some.

    Args:
        checkpoints, weights: where it keeps them.
    """
    if steps_in(checkpoints) or any(path.exists() for path in weights):
        return False
    try:
        return History(folder, resume=True).saved_step == 0
    except DataError:
        return False


def said_of_taken(entries: Sequence[str], *, is_unsaved: bool) -> str:
    """What is said of a run that has a folder which another one asks for: what there is of it, and what can be done."""
    there = f"({', '.join(entries[:3])})"
    if is_unsaved:
        begins = f"begin again in it with {RESUME} or `overwrite: true`, by the same keys or others"
        return f"{there}, of which no step is saved; {begins}, or give another `run_dir`"
    return f"{there}; continue it with {RESUME}, replace it with `overwrite: true`, or give another `run_dir`"

"""What engines have learned about drafts, kept beside a checkpoint: from its first step on a resumed run drafts as
the one before it would have.

It changes speed alone, so a checkpoint is whole without it: what is gone, damaged or of another version is passed over,
and said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from plait.checkpoint.store import WriteParts
from plait.errors import DataError
from plait.file_form import FileForm
from plait.models.files.tensor_file import FileDigest
from plait.output import write_file
from plait.recipes.engine_checks import learns_acceptance
from plait.recipes.recipe import Recipe
from plait.runtime.workers import Workers
from plait.settings import what_is_refused
from plait.speculation.knowledge import Known

NAME = "speculation.json"
FORM = FileForm("speculation-record")


def writing_parts(workers: Workers, recipe: Recipe, tell: Callable[[str], None]) -> WriteParts:
    """Writes what ranks have of a checkpoint and, where engines learn how often drafts are accepted, NAME beside it:
    that is not in the manifest.

    Args:
        tell: is told which engines are left out there.
    """

    def write(folder: Path) -> tuple[dict[str, FileDigest], dict[str, Any]]:
        written = workers.checkpoint.save(folder)
        if learns_acceptance(recipe):
            known, notes = workers.draft_knowledge.told()
            engines = [engine.model_dump(mode="json") for engine in known]
            record = {**FORM.head, "engines": engines}
            write_file(folder / NAME, json.dumps(record) + "\n")
            _tell_all(notes, tell)
        return written

    return write


def take_up_knowledge(workers: Workers, recipe: Recipe, folder: Path, tell: Callable[[str], None]) -> None:
    """Let the engines of a resumed run know what stands beside its checkpoint.

    Args:
        folder: of the checkpoint.
        tell: is told what does not hold any longer.
    """
    if not learns_acceptance(recipe):
        return
    try:
        notes = workers.draft_knowledge.take_up(read_known(folder / NAME))
    except DataError as error:
        notes = [f"what was learned about draft tokens is lost, and learned again: {error}"]
    _tell_all(notes, tell)


def read_known(path: Path) -> list[Known]:
    """What engines had learned.

    Raises:
        DataError: the file is not there, is of another kind or version, or damaged.
    """
    engines = FORM.read(path).get("engines")
    if not isinstance(engines, list):
        raise DataError(f"{path}: expected a list under `engines`, found {engines!r:.80}")
    try:
        return [Known.model_validate(engine) for engine in engines]
    except ValidationError as error:
        raise DataError(f"{path}: {what_is_refused(error)}") from None


def _tell_all(notes: Sequence[str], tell: Callable[[str], None]) -> None:
    for note in notes:
        tell(f"speculative decoding: {note}")

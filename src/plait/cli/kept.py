"""Responses on disk as soon as they are finished, so that what breaks a run off takes none of them along, and the same
command with `--resume` draws only those that are missing.

`OUT.partial`, beside the output, begins with what the run was asked for; behind that stand the responses in the order
in which they ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import ConfigError, RunError
from plait.file_form import FileForm
from plait.observe.run_log import cut_torn_line, encode_row, read_rows

if TYPE_CHECKING:
    from plait.data.records import Sample

FORM = FileForm("generation")


def kept_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


class Kept:
    """What is finished of a run, on disk.

    Args:
        asked: what decides the responses, by option; a run is resumed with the same.
        resume: take up what an earlier run left.
        overwrite: drop what an earlier run left.

    Raises:
        ConfigError: there is an earlier run, and neither is said; or there is none to resume, or it was asked for
            something else.
    """

    def __init__(self, out: Path, asked: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False) -> None:
        self.path = kept_path(out)
        self._asked = dict(asked)
        self.rows: list[dict[str, Any]] = []
        """Counts of the finished responses, those of earlier runs included."""
        exists = self.path.exists()
        if resume and not exists:
            raise ConfigError(f"--resume: there is no `{self.path}` to go on from; leave --resume out to begin")
        if resume:
            self.rows = self._read()
        elif exists and overwrite:
            self.drop()
        elif exists:
            raise ConfigError(
                f"--out: `{self.path}` holds the responses of a run that was broken off; go on with --resume, begin "
                "again with --overwrite, or give another file"
            )

    @property
    def done(self) -> set[tuple[int, int]]:
        """(row, sample) of every finished response."""
        return {(row["row"], row["sample"]) for row in self.rows}

    def add(self, sample: Sample) -> None:
        """Raises RunError where the file system refuses it."""
        from plait.runtime.evaluating.generation_report import row_of

        row = row_of(sample)
        head = b"" if self.rows else encode_row({"format": FORM.format, "version": FORM.version, "asked": self._asked})
        try:
            with open(self.path, "ab") as file:
                file.write(head + encode_row(row))
        except OSError as error:
            if not self.rows:
                self.drop()
            raise RunError(f"`{self.path}` cannot be written: {error.strerror or error}") from error
        self.rows.append(row)

    def ordered(self) -> list[dict[str, Any]]:
        """The rows in the order of the prompts."""
        return sorted(self.rows, key=lambda row: (row["row"], row["sample"]))

    def drop(self) -> None:
        """All of it stands in `out` now."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> list[dict[str, Any]]:
        cut_torn_line(self.path)
        try:
            head, *rows = read_rows(self.path)
            places = [(row["row"], row["sample"]) for row in rows]
            before = head["asked"] if head.get("format") == FORM.format else None
        except (ValueError, KeyError):
            before, places, rows = None, [], []
        if before is None or len(set(places)) != len(places):
            raise ConfigError(
                f"--resume: `{self.path}` is not what `plait generate` leaves; move it, and leave --resume out"
            )
        asked = json.loads(encode_row(self._asked))
        changed = [f"--{name}" for name in asked if before.get(name) != asked[name]]
        if changed:
            raise ConfigError(
                f"--resume: `{self.path}` was begun with another {', '.join(changed)}; give the options as they were, "
                "or begin again with --overwrite"
            )
        return rows

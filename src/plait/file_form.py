"""The file form of plait's own values: a JSON object that says what it is, `format` and `version`, and its content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import DataError
from plait.json_text import Malformed, parse


@dataclass(frozen=True, slots=True)
class FileForm:
    """How files of one kind begin.

    what:    the kind, in the singular: schedule, timeline, plan, move, layout
    version: of its content; no other is read
    """

    what: str
    version: int = 1

    @property
    def format(self) -> str:
        return f"plait-{self.what}"

    @property
    def head(self) -> dict[str, Any]:
        """What the object begins with."""
        return {"format": self.format, "version": self.version}

    def parse(self, text: str, name: str) -> dict[str, Any]:
        """The object that a text holds; `name` is for messages.

        Raises:
            DataError: it is no JSON, is of another kind or of another version.
        """
        try:
            record = parse(text)
        except Malformed as error:
            expected = f"{name}: expected a {self.what} in JSON"
            raise DataError(f"{expected}, found text that does not parse: {error}") from error
        if not isinstance(record, dict) or record.get("format") != self.format:
            raise DataError(f'{name}: expected a {self.what} file ("format": "{self.format}")')
        if record.get("version") != self.version:
            raise DataError(f"{name}: expected {self.what} version {self.version}, found {record.get('version')!r:.80}")
        return record

    def text_of(self, path: str | Path) -> str:
        """What a file holds.

        Raises:
            DataError: it cannot be read.
        """
        try:
            return Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise DataError(f"{path}: expected a {self.what} file that can be read: {why}") from error

    def read(self, path: Path) -> dict[str, Any]:
        """The object that a file holds. Raises DataError, as of `text_of` and `parse`."""
        return self.parse(self.text_of(path), str(path))

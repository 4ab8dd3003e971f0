"""The file form of plait's own values: a JSON object that says what it is, `format` and `version`, and its content."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import DataError


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, for what others wrote.

    Raises:
        ValueError: it is no JSON, is no UTF-8, or is nested too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


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

    def parse(self, text: str, name: str) -> dict[str, Any]:
        """The object that a text holds; `name` is for messages.

        Raises:
            DataError: it is no JSON, is of another kind or of another version.
        """
        try:
            record = parse_json(text)
        except ValueError as error:
            expected = f"{name}: expected a {self.what} in JSON"
            raise DataError(f"{expected}, found text that does not parse: {error}") from error
        if not isinstance(record, dict) or record.get("format") != self.format:
            raise DataError(f'{name}: expected a {self.what} file ("format": "{self.format}")')
        if record.get("version") != self.version:
            raise DataError(f"{name}: expected {self.what} version {self.version}, found {record.get('version')!r}")
        return record

    def text_of(self, path: str | Path) -> str:
        """What a file holds.

        Raises:
            DataError: it cannot be read.
        """
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise DataError(f"{path}: expected a {self.what} file that can be read: {why}") from error

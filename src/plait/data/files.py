"""Records of a source as they stand: JSONL files. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plait.data.formats import nearest
from plait.errors import DataError

Record = tuple[dict[str, Any], str]
"""Columns, and where they come from, for messages."""


def json_lines(path: Path, key: str) -> Iterator[tuple[dict[str, Any], str]]:
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        near = nearest(path.name, [other.name for other in path.parent.glob("*")]) if path.parent.is_dir() else ""
        raise DataError(f"`{key}`: `{path}` {found}{near}; give a JSONL file, or reasoning_gym:TASK")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"`{path}` is not UTF-8 ({error.reason} at byte {error.start}); `{key}` takes JSONL") from None
    # `splitlines` would also cut at U+2028 and its like, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{place}: malformed JSON ({error.msg} at column {error.colno}); `{key}` takes one object per line"
            ) from None
        if not isinstance(value, dict):
            raise DataError(f"{place}: expected a JSON object, found {type(value).__name__}")
        if "\\ud" in line.lower():
            _check_surrogates(value, place)
        yield value, place


def _check_surrogates(value: dict[str, Any], place: str) -> None:
    """JSON can write half of a surrogate pair, which is no text: it can be neither tokenised nor written again."""
    for name, column in value.items():
        try:
            json.dumps({name: column}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            lone = ord(error.object[error.start])
            raise DataError(
                f"{place}: column `{name}` holds a lone surrogate (\\u{lone:04x}), which is no character; mend the text"
            ) from None

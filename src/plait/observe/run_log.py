"""Append-only JSONL files: one JSON object per line, written whole or not at all.

A log knows its length in bytes. A checkpoint stores that length, and a resumed run cuts the log back to it, so
that each step stands once in every log. What a crash left of a last line is cut as well.

Floats are written so that they read back bit by bit. JSON has no NaN and no infinities: they are written as the
strings "NaN", "Infinity" and "-Infinity", which `float()` reads (null would say that there is no value). A whole number
beyond all floats is written as a text, too; what is no character, as U+FFFD.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plait.errors import DataError, RunError
from plait.file_writes import AppendedFile, writing
from plait.json_text import MAX_DIGITS, kind_of, parse
from plait.output import write_file

_SCAN_BYTES = 1 << 16
_BEYOND_FLOATS = 10**MAX_DIGITS


class RunLog(AppendedFile):
    """Appends rows to a JSONL file; see `AppendedFile`.

    With `resume=True` an existing file is continued (a torn last line is cut first); without it the file is begun
    anew. `opened` is as of `AppendedFile`.
    """

    def __init__(self, path: str | Path, *, resume: bool = False, opened: int | None = None) -> None:
        path = Path(path)
        with writing(path):
            if resume and path.exists():
                cut_torn_line(path)
        super().__init__(path, keep=resume, opened=opened)

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row. Values are JSON values or scalars that have `item()`, such as NumPy's.

        Raises:
            RunError: the file system refuses it; the file ends with the row before.
        """
        self._write(encode_row(row))


def truncate_to(path: str | Path, offset: int) -> None:
    """Cut `path` to its first `offset` bytes; a missing file counts as an empty one.

    Raises:
        RunError: the file is shorter than that, so rows that the run had written are gone.
    """
    path = Path(path)
    num_bytes = path.stat().st_size if path.exists() else 0
    if num_bytes < offset:
        raise RunError(
            f"the log {path} should hold at least {offset} bytes, as the checkpoint says, but holds {num_bytes}: it "
            "was cut or replaced since. Put the file back, or start over with another `run_dir` or `overwrite: true`."
        )
    if num_bytes > offset:
        os.truncate(path, offset)


def cut_torn_line(path: str | Path) -> int:
    """Cut what follows the last line end of `path`; return how many bytes that were."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        keep = size
        while keep > 0:
            start = max(0, keep - _SCAN_BYTES)
            file.seek(start)
            end = file.read(keep - start).rfind(b"\n")
            if end >= 0:
                keep = start + end + 1
                break
            keep = start
    if keep < size:
        os.truncate(path, keep)
    return size - keep


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Return the whole rows of a log; a torn last line is left out.

    Raises:
        DataError: a whole line is no JSON object; names the line.
    """
    text = Path(path).read_bytes()
    rows = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            row = parse(line)
        except ValueError as error:
            raise damaged(f"{path}:{number}", str(error)) from None
        if not isinstance(row, dict):
            raise damaged(f"{path}:{number}", f"expected a JSON object, found {kind_of(row)}")
        rows.append(row)
    return rows


def read_steps(path: str | Path) -> list[dict[str, Any]]:
    """`read_rows` of a log whose rows say of which step they are.

    Raises:
        DataError: a whole line is no JSON object with a whole number as `step`; names the line.
    """
    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        if type(row.get("step")) is not int:
            raise damaged(f"{path}:{number}", f"expected a whole number as `step`, found {row.get('step')!r:.40}")
    return rows


def numbers_of(row: Mapping[str, Any], path: str | Path) -> dict[str, float]:
    """A row's numbers by name, all but `step`; NaN and infinities are words in a log.

    Raises:
        DataError: a value is no number.
    """
    words = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    numbers: dict[str, float] = {}
    for name, value in row.items():
        number = words.get(value, value) if isinstance(value, str) else value
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise damaged(path, f"expected a number as `{name}` of step {row.get('step')}, found {value!r:.40}")
        numbers[name] = number
    del numbers["step"]
    return numbers


def cut_after(path: str | Path, step: int) -> None:
    """Cut a log before its first row of a later step; a torn last line goes too.

    Raises:
        DataError: it is damaged (`read_steps`). RunError: it cannot be cut.
    """
    rows = read_steps(path)
    lines = Path(path).read_bytes().split(b"\n")
    kept = next((place for place, row in enumerate(rows) if row["step"] > step), len(rows))
    truncate_to(path, sum(len(line) + 1 for line in lines[:kept]))


def damaged(path: str | Path, why: str) -> DataError:
    """What is said of a file of a run's folder that is not as the run has written it."""
    return DataError(f"{path} is damaged: {why}; put a copy back, or start over in another `run_dir`")


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole JSONL file at once, in a folder that is made if need be: it appears complete, or not at all.

    Raises:
        RunError: the file system refuses it.
    """
    path = Path(path)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        write_file(path, map(encode_row, rows), durable=False)


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return `row` as one line of JSON that `read_rows` reads, its line end included."""
    text = json.dumps(_plain(row, "row"), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, which is no character
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode() + b"\n"


def _plain(value: Any, where: str) -> Any:
    match value:
        case str() | bool() | None:
            return value
        case int():
            return int(value) if abs(value) < _BEYOND_FLOATS else str(int(value))
        case float():
            if math.isfinite(value):
                return float(value)
            return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
        case Mapping():
            return {_key(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
        case list() | tuple():
            return [_plain(item, where) for item in value]
    assert hasattr(value, "item"), f"{where} holds a {type(value).__name__}, which no log can hold"
    return _plain(value.item(), where)


def _key(key: Any, where: str) -> str:
    assert isinstance(key, str), f"{where} has the key {key!r}; keys of a log row are strings"
    return str(key)

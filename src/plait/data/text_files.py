"""Records of files of text: JSONL, a list in JSON, CSV and TSV, each also packed by gzip. Torch-free."""

from __future__ import annotations

import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.data.other_forms import GZIP, SEPARATED, no_text, remedy
from plait.errors import DataError
from plait.json_text import Malformed, kind_of
from plait.json_text import parse as parse_json

Record = tuple[dict[str, Any], str]
"""Columns of values that JSON has, and the place where they stand, for messages."""

_WORD_OR_NUMBER = re.compile(r"true|false|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.IGNORECASE)
"""A cell that is a value of JSON; of a number with leading zeros, as 007, it is not one."""

_TEXTS = ("prompt", "completion", "chosen", "rejected", "text")
"""Columns that hold texts also where all of them are numbers."""


def text_records(path: Path, key: str) -> Iterable[Record]:
    """The records of a file: a table if its name ends with .csv or .tsv, else objects, one per line or in one list.

    A column of a table whose cells all are numbers, or all true or false (whatever their case), holds these, and null
    where a cell is empty. Any other column, and one of prompts or completions, holds texts. Columns without a name, as
    pandas writes its index, are left out.

    Raises:
        DataError: the file cannot be read or is malformed; `key` is named.
    """
    text = _text_of(path, key)
    end = Path(path.name.removesuffix(".gz")).suffix.lower()
    if end in SEPARATED:
        return _table_records(path, text, SEPARATED[end], key)
    return _list_records(path, text, key) if text.lstrip()[:1] == "[" else _line_records(path, text, key)


def _text_of(path: Path, key: str) -> str:
    try:
        content = path.read_bytes()
        if content.startswith(GZIP):
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(no_text(path, error, key)) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"`{key}`: `{path}` is packed by gzip, and damaged ({error}); pack or fetch it again") from None
    except OSError as error:
        raise DataError(f"`{key}`: `{path}` cannot be read: {error.strerror or error}") from None


# --- JSON --------------------------------------------------------------------------------------------------------


def _line_records(path: Path, text: str, key: str) -> Iterator[Record]:
    # `splitlines` would also cut at U+2028 and its like, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                value = parse_json(line)
            except Malformed as error:
                raise DataError(f"{place}: malformed JSON ({error}); {remedy(path, line, key)}") from None
            yield _object(value, place, remedy(path, line, key)), place


def _list_records(path: Path, text: str, key: str) -> Iterator[Record]:
    takes = f"`{key}` takes a list of objects, or one object per line"
    try:
        values = parse_json(text)
    except Malformed as error:
        raise DataError(f"{path}: malformed JSON ({error}); {takes}") from None
    for number, value in enumerate(values, start=1):
        place = f"{path}#{number}"
        yield _object(value, place, takes), place


def _object(value: Any, place: str, takes: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a JSON object, found {kind_of(value)}; {takes}")
    return value


# --- tables ------------------------------------------------------------------------------------------------------


def _table_records(path: Path, text: str, separators: str, key: str) -> Iterator[Record]:
    header, _, _ = text.lstrip().partition("\n")
    separator = next((sign for sign in separators if sign in header), separators[0])
    rows, places = list[list[str]](), list[str]()
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    with _long_cells():
        while True:
            place = f"{path}:{reader.line_num + 1}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise DataError(
                    f"{place}: malformed table ({error}); `{key}` takes cells that are quoted where they hold "
                    'separators, line ends or quotes, each of these twice ("")'
                ) from None
            if cells is None:
                break
            if not cells:
                continue
            rows.append(cells)
            places.append(place)
            if len(cells) != len(rows[0]):
                raise DataError(
                    f"{place}: expected {len(rows[0])} cells, as the header has, found {len(cells)}; quote those that "
                    f"hold `{separator}`"
                )
    yield from _typed(path, rows, places, key)


def _typed(path: Path, rows: Sequence[list[str]], places: Sequence[str], key: str) -> Iterator[Record]:
    """Rows as records, the first of them the header."""
    names = [name.strip() for name in rows[0]] if rows else []
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise DataError(f"`{key}`: `{path}` has several columns `{twice[0]}`; keep one of them")
    columns = dict[str, list[Any]]()
    for place, name in enumerate(names):
        cells = [row[place] for row in rows[1:]]
        if name:
            columns[name] = list[Any](cells) if name in _TEXTS else _values(cells)
    for number, place in enumerate(places[1:]):
        yield {name: values[number] for name, values in columns.items()}, place


def _values(cells: list[str]) -> list[Any]:
    """The cells of a column: as the numbers, or as true and false, that all of them are; else as they stand."""
    filled = [cell for cell in cells if cell]
    if not filled or not all(map(_WORD_OR_NUMBER.fullmatch, filled)):
        return list(cells)
    try:
        values = [parse_json(cell.lower()) if cell else None for cell in cells]
    except Malformed:  # a number beyond all floats
        return list(cells)
    of_words = [isinstance(value, bool) for value in values if value is not None]
    return values if all(of_words) or not any(of_words) else list(cells)


@contextmanager
def _long_cells() -> Iterator[None]:
    """Cells may be as long as texts are: of the whole process Python keeps one limit, which is put back."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)

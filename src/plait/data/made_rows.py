"""What a function of the user's makes of the rows of a source as they are read: `data.rows`. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from plait.data.plain_values import plain
from plait.errors import DataError
from plait.json_text import kind_of
from plait.user_code import CALL_LIMIT_S, UserCode
from plait.user_draws import draws_kept, seed_all

RowFunction = Callable[[dict[str, Any]], Any]
"""A row → a row, a list of rows, or None, which leaves it out."""
Record = tuple[dict[str, Any], str]
"""The columns of a row, and the place where it stands, for messages."""
FindFunction = Callable[[str], RowFunction]
"""A function's path, as a recipe says it → the function."""


class RowMaker:
    """Makes records of the records of a source, each by itself; what the function draws at random is of the row's
    number alone, so that a run that is resumed reads the same.

    Args:
        path: of the function, as the recipe says it.
    """

    def __init__(self, function: RowFunction, path: str) -> None:
        self._function = function
        self._path = path

    def made_of(self, records: Iterable[Record]) -> list[Record]:
        """All that is made of them, in their order; of a list of rows each says its number behind the place.

        Raises:
            DataError: the function raised, does not come back, or gave something else; the row's place is named.
        """
        made: list[Record] = []
        with draws_kept():
            for number, (value, place) in enumerate(records):
                seed_all(f"data.rows {number}")
                with UserCode(f"{place}: {self._said}", DataError, limit_s=CALL_LIMIT_S):
                    given = self._function(value)
                made += self._records(given, place)
        return made

    @property
    def _said(self) -> str:
        return f"`data.rows` ({self._path})"

    def _records(self, given: Any, place: str) -> list[Record]:
        if given is None:
            return []
        if not isinstance(given, list | tuple):
            return [self._record(given, place)]
        return [self._record(row, f"{place}[{number}]") for number, row in enumerate(given)]

    def _record(self, given: Any, place: str) -> Record:
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise DataError(
                f"{place}: {self._said} is to give a row (a dict of columns), a list of rows, or None, found "
                f"{kind_of(given)}: {given!r:.80}"
            )
        return {name: plain(value, name, place) for name, value in given.items()}, place


def maker_of(path: str | None, find: FindFunction | None) -> RowMaker | None:
    """What makes rows of a source's records by the function of a path; None: they are rows as they stand.

    Raises:
        ConfigError: `find` raises it.
    """
    if path is None:
        return None
    assert find is not None, "who opens sources of the user's finds their functions"
    return RowMaker(find(path), path)

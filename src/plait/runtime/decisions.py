"""Decisions of a run that depended on the clock, kept in its folder: a run that is resumed decides the same again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from plait.observe.run_log import cut_torn_line, read_rows

CallOfStep = tuple[int, str]
"""A step, counted from 1, and a call of it."""


class Decisions:
    """One row of JSON for each call of a step; `step` and `call` are among its values.

    Args:
        path: of the file. What is there was decided before, by the run that is resumed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.is_file():
            cut_torn_line(path)
        rows: Iterable[dict[str, Any]] = read_rows(path) if path.is_file() else ()
        self._rows = {(row["step"], row["call"]): row for row in rows}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All, in the order in which they were made."""
        return list(self._rows.values())

    def of(self, key: CallOfStep) -> dict[str, Any] | None:
        """What was decided before; None: nothing was."""
        return self._rows.get(key)

    def keep(self, key: CallOfStep, values: dict[str, Any]) -> None:
        """Write what was decided, unless that is there from before."""
        if key in self._rows:
            return
        row = {"step": key[0], "call": key[1], **values}
        self._rows[key] = row
        with open(self._path, "a") as file:
            file.write(json.dumps(row) + "\n")

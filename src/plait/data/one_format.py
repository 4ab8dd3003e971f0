"""Whether all rows of a source are of one format. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from plait.data.formats import Row, RowKind, parts_of
from plait.errors import DataError


def check_one_format(rows: Sequence[Row], kind: RowKind) -> None:
    """Raises DataError where the rows are not all of one format; both places are named."""
    first = _format(rows[0], kind)
    for row in rows:
        if (other := _format(row, kind)) != first:
            raise DataError(
                f"mixed formats: the {first[0]} of {rows[0].place} is {first[1]}, the {other[0]} of {row.place} is "
                f"{other[1]}; make all rows alike"
            )


def _format(row: Row, kind: RowKind) -> tuple[str, str]:
    """(the column by which a row's format is told, the format), both in words."""
    if kind is RowKind.PROMPTS:
        return "prompt", "a text" if isinstance(row.prompt, str) else "messages"
    parts = parts_of(row.columns, kind, row.place)
    if parts.prompt is None:
        return "text", "a text"
    return "completion", "messages" if parts.conversational else "a text"

"""Labelled responses: each of a prompt, a completion, and whether that is desirable. Of a pair two. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plait.data.formats import Row, RowKind, make_row, parts_of
from plait.errors import DataError


def rows_of_record(value: dict[str, Any], kind: RowKind, prompt_column: str, place: str) -> list[Row]:
    """A record as rows of that kind: one, but two where a pair stands and labelled responses are asked for.

    Raises:
        DataError: as `formats.make_row`; or a label is none.
    """
    present = {name for name, column in value.items() if column is not None}
    if kind is RowKind.LABELLED and {"chosen", "rejected"} <= present and "completion" not in present:
        return unpaired(make_row(value, RowKind.PAIRS, prompt_column, place))
    row = make_row(value, kind, prompt_column, place)
    if kind is RowKind.LABELLED and not _is_label(label := row.columns["label"]):
        raise DataError(f"{place}: `label` must be true (the response is desirable) or false, found {label!r:.80}")
    return [row]


def _is_label(value: Any) -> bool:
    """Also 1 or 0, as which some tables keep it."""
    return isinstance(value, bool | int | float) and value in (0, 1)


def unpaired(pair: Row) -> list[Row]:
    """The chosen completion of a pair, with the label True, and the rejected one, as TRL's `unpair_preference_dataset`.
    Both have the other columns of the pair."""
    parts = parts_of(pair.columns, RowKind.PAIRS, pair.place)
    others = {name: column for name, column in pair.columns.items() if name not in ("prompt", "chosen", "rejected")}
    return [
        replace(pair, columns={"prompt": parts.prompt, **others, "completion": completion, "label": label})
        for completion, label in zip(parts.completions, (True, False), strict=True)
    ]

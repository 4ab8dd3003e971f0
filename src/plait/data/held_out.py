"""Which rows of a source are held out. Torch-free."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from plait.data.formats import Row, RowKind, text_of
from plait.errors import DataError


def ordered(rows: list[Row], kind: RowKind) -> list[Row]:
    """The rows that held-out ones are taken of: of a question the first. Of labelled responses to one prompt this is
    another than the first of the file, which may always have the same label."""
    if kind is not RowKind.LABELLED:
        return rows
    return sorted(rows, key=lambda row: _digest(row.question + text_of(row.columns["completion"])))


def _digest(text: str, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text.encode(), key=key, digest_size=16).digest()


def hold_out(rows: Sequence[Row], items: int | None, seed: int, name: str, asks: str) -> list[Row]:
    """One row of each of `items` distinct questions (None: of all), those whose keyed hash is least: no row's place
    matters.

    Args:
        name: of the source, for messages.
        asks: the key that says how many, for messages.

    Raises:
        DataError: there are fewer.
    """
    if items == 0:
        return []
    unique = {row.question: row for row in reversed(rows)}
    if items is not None and len(unique) < items:
        raise DataError(f"`{asks}` asks for {items} questions, `{name}` has {len(unique)} distinct ones; lower it")
    key = seed.to_bytes(8, "little")
    ranked = sorted(unique, key=lambda text: _digest(text, key))
    return [unique[text] for text in ranked[:items]]

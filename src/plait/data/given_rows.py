"""Given samples as rows, with what the data say of them as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from plait.data.examples import Given
from plait.data.numbers import is_of_data, number_of
from plait.data.rows import Rows
from plait.dataflow import Column, Level

_COLUMNS: dict[str, Callable[[Given], float | tuple[float, ...]]] = {
    "trained": lambda given: given.trained,
    "margin": lambda given: given.margin,
    "label": lambda given: given.label,
}
"""By the names of the graph."""


def given_rows(given: Iterable[Given], columns: Sequence[Column]) -> Rows:
    """Given samples in the order of their prompts, with these columns of a READ node: `trained`, `margin`, `label`, and
    numbers of the data."""
    ordered = sorted(given, key=lambda one: (one.sample.prompt.uid, one.sample.index))
    rows = Rows(tuple(one.sample for one in ordered))
    for column in columns:
        if is_of_data(column):
            rows = rows.with_column(column, [number_of(sample.prompt, column) for sample in rows.samples])
            continue
        values = [_COLUMNS[column.name](one) for one in ordered]
        rows = rows.with_column(column, np.concatenate(values) if column.level is Level.TOKEN else np.array(values))
    return rows

"""Numbers of the data that a flow reads as columns. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable

from plait.data.formats import Row
from plait.data.records import Prompt
from plait.dataflow import Column, Node
from plait.dataflow.unfit import nearest
from plait.errors import DataError
from plait.metric_names import OF_DATA


def is_of_data(column: Column) -> bool:
    """Whether it is one that `Samples.data` asks for."""
    return column.name.startswith(OF_DATA)


def names_asked(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The columns of the data that a flow asks of these samples as numbers."""
    columns = (column for node in nodes for column in node.outputs if is_of_data(column))
    return tuple(dict.fromkeys(column.name.removeprefix(OF_DATA) for column in columns))


def check_numbers(rows: Iterable[Row], names: Collection[str]) -> None:
    """Raises DataError where a row has no finite number in one of these columns; true and false are numbers."""
    for row in rows if names else ():
        for name in names:
            value = row.columns.get(name)
            if name not in row.columns:
                found = f"no column of that name{nearest(name, list(row.columns))}"
            elif not isinstance(value, int | float):
                found = "null" if value is None else f"{value!r:.80}"
            elif not abs(value) <= sys.float_info.max:
                found = "one that is not finite"
            else:
                continue
            raise DataError(
                f"{row.place}: the flow reads a number in the column `{name}`, found {found}; give every row one"
            )


def number_of(prompt: Prompt, column: Column) -> float:
    """The number in a column of the prompt's row, which was checked to have one."""
    return float(prompt.columns[column.name.removeprefix(OF_DATA)])

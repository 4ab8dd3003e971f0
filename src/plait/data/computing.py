"""COMPUTE nodes run on rows: what a function of the flow reads of them, and what it makes (`rows` says the shapes)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np

from plait.data.lineage import Meeting
from plait.data.rows import FloatArray, Rows
from plait.dataflow.graph import CallKind, Column, Grain, Level, Node
from plait.errors import RunError
from plait.user_code import CALL_LIMIT_S, UserCode, is_users, title_of


def evaluate(
    node: Node, tables: Mapping[int, Rows], batch: Mapping[Column, FloatArray] = MappingProxyType({})
) -> FloatArray:
    """Run a COMPUTE node's function over the rows that it belongs to.

    A SAMPLE column of other rows is matched: by prompt (a greedy baseline), or where some of them were made of others
    (what a judge said of each sample) by these (`lineage.Meeting`). A group function gets all values there that belong
    to its samples, a per-sample function needs exactly one of them, a batch function gets all values.

    Args:
        tables: id of each GENERATE or READ node → its rows, holding every input column of `node`.
        batch: values for the whole batch so far.

    Returns:
        The new column, [N] or [R] float64, for the rows `node.rows`; of level BATCH the value, of any shape.

    Raises:
        RunError: the function raises; or it returns another shape than its grain and level ask for, or a value that is
            no finite number.
    """
    assert node.kind is CallKind.COMPUTE, f"{node.call} is not a COMPUTE node"
    assert node.fn is not None, f"{node.call} has no function"
    fn, output = node.fn, node.outputs[0]
    title, users = _title(node), is_users(node.fn)
    limit_s = CALL_LIMIT_S if users else None

    def called(where: str, *given: Any) -> Any:
        with UserCode(where, RunError, users=users, limit_s=limit_s):
            return fn(*given, **node.computing.constants)

    def arguments(read: Callable[[Column], Any]) -> list[Any]:
        return [_plain(batch[c]) if c.level is Level.BATCH else read(c) for c in node.inputs.values()]

    if output.level is Level.BATCH:
        result = called(title, *arguments(lambda column: _of_batch(column, tables[column.rows])))
        return _checked(result, None, "one number or an array of numbers", title)
    rows = tables[node.rows]
    values = np.empty(rows.shape_of(output.level))

    def put(position: int, result: FloatArray) -> None:
        values[_cell(rows, output.level, position)] = result

    match node.grain:
        case Grain.SAMPLE:
            for position, sample in enumerate(rows.samples):
                where = f"{title}, {sample.prompt.title(sample.index)}"
                returned = called(where, *arguments(partial(_of_sample, tables, node, position)))
                put(position, _checked(returned, *_expected(rows, output, position), where))
        case Grain.GROUP:
            for members in rows.groups.values():
                where = f"{title}, {rows.samples[members[0]].prompt.title()}"
                result = called(where, *of_group(node, members, tables, batch).values())
                _spread(result, rows, output, members, where, put)
        case Grain.BATCH:
            where = f"{title}, the whole batch"
            result = called(where, *arguments(lambda column: _of_batch(column, tables[column.rows])))
            _spread(result, rows, output, range(len(rows)), where, put)
    return values


def of_group(
    node: Node, members: Sequence[int], tables: Mapping[int, Rows], batch: Mapping[Column, FloatArray]
) -> dict[str, Any]:
    """What a node that calls a function of each group reads of a group, by the names of its inputs: see
    `plait.dataflow.per_group`.

    Args:
        members: positions of the group in the rows of the node.
    """
    return {
        name: _plain(batch[column]) if column.level is Level.BATCH else _of_group(tables, node, members, column)
        for name, column in node.inputs.items()
    }


def spread_to(column: Column, source: Rows, target: Rows, node: Node) -> FloatArray:
    """A SAMPLE column of `source` as a column of `target`, the rows of `node`: each sample takes the value of the only
    one there that belongs to it.

    Raises:
        RunError: not exactly one does.
    """
    return np.array([_only_value(column, source, target, node, i, node.call) for i in range(len(target))])


def trained_rows(node: Node, tables: Mapping[int, Rows]) -> Rows:
    """What a TRAIN node trains on: its rows without those that `keep` leaves out, the columns of other rows that it
    reads spread to them. NaN, such as the score of a function that does not apply, leaves a sample out, too.

    Raises:
        RunError: as of `spread_to`.
    """
    rows = tables[node.rows]
    for column in node.inputs.values():
        if column.level is not Level.BATCH and column.rows != node.rows:
            rows = rows.with_column(column, spread_to(column, tables[column.rows], rows, node))
    kept = None if node.keep is None else np.flatnonzero(np.nan_to_num(rows.columns[node.keep]))
    return rows if kept is None else rows.select(kept.tolist())


def _plain(value: FloatArray) -> Any:
    """A value for the whole batch as a function gets it: a float, or an array of its own."""
    return float(value) if value.ndim == 0 else value.copy()


def _cell(rows: Rows, level: Level, position: int) -> Any:
    return position if level is Level.SAMPLE else slice(rows.offsets[position], rows.offsets[position + 1])


def _expected(rows: Rows, output: Column, position: int) -> tuple[tuple[int, ...], str]:
    if output.level is Level.SAMPLE:
        return (), "one number (with level=Level.TOKEN one per response token)"
    tokens = int(rows.offsets[position + 1] - rows.offsets[position])
    return (tokens,), f"one number per response token ({tokens})"


def _of_sample(tables: Mapping[int, Rows], node: Node, position: int, column: Column) -> Any:
    rows = tables[node.rows]
    if column.rows != node.rows:
        return _only_value(column, tables[column.rows], rows, node, position, _title(node))
    value = rows.columns[column][_cell(rows, column.level, position)]
    return float(value) if column.level is Level.SAMPLE else value.copy()


def _of_group(tables: Mapping[int, Rows], node: Node, members: Sequence[int], column: Column) -> Any:
    """What a function over a group gets of a column.

    Args:
        members: positions of the group in the rows of the node.
    """
    rows, own = tables[column.rows], tables[node.rows]
    if column.rows != node.rows:
        members = belonging(own, node.rows, members, rows, column.rows)
    if column.level is Level.SAMPLE:
        return rows.columns[column][list(members)]
    return [rows.columns[column][_cell(rows, Level.TOKEN, i)].copy() for i in members]


def belonging(own: Rows, call: int, positions: Sequence[int], others: Rows, other_call: int) -> list[int]:
    """Positions of other rows that belong to some of one's own, in the order of these.

    Args:
        call, other_call: ids of the nodes that made the rows.
    """
    meeting = Meeting.of(own.samples, call, others.samples, other_call)
    keys = dict.fromkeys(meeting.key(own.samples[position]) for position in positions)
    places = others.places(meeting)
    return [place for key in keys for place in places.get(key, ())]


def _of_batch(column: Column, rows: Rows) -> Any:
    if column.level is Level.SAMPLE:
        return rows.columns[column].copy()
    return [rows.columns[column][_cell(rows, Level.TOKEN, i)].copy() for i in range(len(rows))]


def _only_value(column: Column, source: Rows, rows: Rows, node: Node, position: int, reader: str) -> float:
    members = belonging(rows, node.rows, (position,), source, column.rows)
    if len(members) != 1:
        sample = rows.samples[position]
        meets = Meeting.of(rows.samples, node.rows, source.samples, column.rows)
        raise RunError(
            f"{reader} reads {column} of other samples: expected exactly one of them for "
            f"{sample.prompt.title(sample.index if meets.depth else None)}, found {len(members)}; give that `generate` "
            "call samples_per_prompt=1, or read the column per group"
        )
    return float(source.columns[column][members[0]])


def _spread(
    result: Any,
    rows: Rows,
    output: Column,
    members: Sequence[int],
    where: str,
    put: Callable[[int, FloatArray], None],
) -> None:
    """Hand a group's or the batch's result to its samples."""
    if output.level is Level.SAMPLE:
        expected = f"one number per sample ({len(members)})"
        for position, value in zip(members, _checked(result, (len(members),), expected, where), strict=True):
            put(position, value)
        return
    if not hasattr(result, "__len__") or len(result) != len(members):
        length = len(result) if hasattr(result, "__len__") else repr(result)
        raise RunError(f"{where}: expected a list with one array per sample ({len(members)}), found {length}")
    for position, values in zip(members, result, strict=True):
        put(position, _checked(values, *_expected(rows, output, position), f"{where}, {rows.samples[position].uid}"))


def _checked(result: Any, shape: tuple[int, ...] | None, expected: str, where: str) -> FloatArray:
    """What a function returned, as finite numbers of this shape; None: of any.

    Raises:
        RunError: it is something else: no numbers (None, texts, complex ones), another shape, NaN or infinities.
    """
    try:
        values = np.asarray(result)
        if values.dtype.kind == "O" and all(isinstance(number, Real | Decimal) for number in values.flat):
            values = values.astype(np.float64)  # fractions, decimals, numbers of other libraries
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # ragged; a tensor with a gradient
        raise RunError(f"{where}: expected {expected}, found {result!r:.80} ({error})") from None
    if values.dtype.kind not in "biuf":
        kind = "complex numbers" if values.dtype.kind == "c" else f"{result!r:.80}"
        raise RunError(f"{where}: expected {expected}, found {kind}")
    if shape is not None and values.shape != shape:
        raise RunError(f"{where}: expected {expected}, found an array of shape {values.shape}")
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise RunError(f"{where}: expected finite numbers, found {values[~np.isfinite(values)].flat[0]}")
    return values


def are_equal(values: FloatArray) -> bool:
    """Whether the numbers that are there, which NaN are not, do not differ."""
    there = values[np.isfinite(values)]
    return not len(there) or bool(np.ptp(there) == 0)


def _title(node: Node) -> str:
    assert node.fn is not None, f"{node.call} has no function"
    return f"per_{node.grain}({title_of(node.fn)}) -> {node.outputs[0]}"

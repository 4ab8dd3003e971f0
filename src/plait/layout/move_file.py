"""The plan of a move as a JSON text."""

from __future__ import annotations

import json
from typing import Any

from plait.errors import DataError
from plait.file_form import FileForm
from plait.layout.boxes import Slice
from plait.layout.mesh import Cluster
from plait.layout.move_plan import MoveAction, MoveKind, MovePlan

FORM = FileForm("move")


def to_json(plan: MovePlan) -> str:
    """The plan as JSON text, which `from_json` reads back."""
    rows = {
        str(rank): [[x.kind.value, x.seq, x.round, x.peer, [*map(list, x.source)], [*map(list, x.target)]] for x in row]
        for rank, row in sorted(plan.rows.items())
    }
    record = {
        "format": FORM.format,
        "version": FORM.version,
        "nodes": plan.cluster.nodes,
        "devices": plan.cluster.devices,
        "source_dtype": plan.source_dtype,
        "target_dtype": plan.target_dtype,
        "wire_dtype": plan.wire_dtype,
        "bucket_bytes": plan.bucket_bytes,
        "rows": rows,
    }
    return json.dumps(record)


def from_json(text: str, name: str = "move") -> MovePlan:
    """The plan of a text that `to_json` made.

    Args:
        name: for the message.

    Raises:
        DataError: the text is no such plan.
    """
    record = FORM.parse(text, name)
    try:
        rows = {int(rank): tuple(_action(words) for words in row) for rank, row in record["rows"].items()}
        return MovePlan(
            Cluster(record["nodes"], record["devices"]),
            rows,
            *(record[key] for key in ("source_dtype", "target_dtype", "wire_dtype", "bucket_bytes")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{name}: expected the rows of a move, found {error!r}") from error


def _action(words: list[Any]) -> MoveAction:
    kind, seq, round_, peer, source, target = words
    slices = lambda rows: tuple(Slice(b, o, tuple(shape), tuple(strides)) for b, o, shape, strides in rows)  # noqa: E731
    return MoveAction(MoveKind(kind), seq, round_, peer, slices(source), slices(target))

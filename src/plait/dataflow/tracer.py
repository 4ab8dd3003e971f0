"""Collects the nodes of a flow while it is traced. One trace at a time per thread of control."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from plait.dataflow.call_name import numbered
from plait.dataflow.graph import CallKind, Column, Grain, Level, Node
from plait.dataflow.options import GenerateOptions, Options, TrainOptions
from plait.errors import FlowError

MAX_NODES = 1000
"""Calls that a flow may make; the largest of ours makes some twenty."""

_CURRENT: ContextVar[Tracer] = ContextVar("plait.dataflow.tracer")


class Tracer:
    """Collects the nodes of one trace and keeps call names unique."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.teachers: set[str] = set()

    def add(
        self,
        call: str,
        kind: CallKind,
        grain: Grain,
        *,
        role: str | None = None,
        rows: int | None = None,
        inputs: dict[str, Column] | None = None,
        outputs: tuple[tuple[str, Level] | tuple[str, Level, int], ...] = (),
        fn: Callable[..., Any] | None = None,
        options: Options | None = None,
    ) -> Node:
        """
        Args:
            outputs: name and level of each column, and numbers per token where these are several.

        Raises:
            FlowError: the options are wrong, or the flow makes too many calls.
        """
        if isinstance(options, GenerateOptions | TrainOptions) and (problem := options.problem) is not None:
            raise FlowError(f"{call}: {problem}")
        if len(self.nodes) >= MAX_NODES:
            raise FlowError(
                f"the flow makes more than {MAX_NODES} calls (the last is {call}): does a loop of it not end? Loops "
                "over data belong in a function given to per_sample, per_group or per_batch"
            )
        used = {node.call for node in self.nodes}
        node_id = len(self.nodes)
        rows = node_id if rows is None else rows
        columns = tuple(Column(name, level, node_id, rows, *width) for name, level, *width in outputs)
        node = Node(node_id, numbered(call, used), kind, grain, role, rows, inputs or {}, columns, fn, options)
        self.nodes.append(node)
        return node

    def add_output(self, node_id: int, name: str, level: Level) -> Column:
        """A further column of a call that is there already, for flows that ask for it; the same one the next time."""
        node = self.nodes[node_id]
        column = Column(name, level, node.id, node.rows)
        if column not in node.outputs:
            self.nodes[node_id] = replace(node, outputs=(*node.outputs, column))
        return column


@contextlib.contextmanager
def tracing(tracer: Tracer) -> Iterator[Tracer]:
    token = _CURRENT.set(tracer)
    try:
        yield tracer
    finally:
        _CURRENT.reset(token)


def current(what: str) -> Tracer:
    """The tracer of the flow under way.

    Raises:
        FlowError: no flow is being traced; `what` names the call that needs one.
    """
    try:
        return _CURRENT.get()
    except LookupError:
        raise FlowError(f"{what} belongs inside a flow, which is run to be traced") from None

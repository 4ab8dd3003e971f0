"""By which numbers a flow weighs the samples of a prompt against each other, and in how many groups these are equal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plait.data.computing import are_equal
from plait.dataflow import CallKind, Column, Dataflow, Grain, Level, Node
from plait.recipes.role_models import REWARD_ROLES
from plait.runtime.steps.step import StepState


def comparison_facts(flow: Dataflow, state: StepState) -> dict[str, float]:
    """Facts for the doctor: `uses_groups`, whether a call weighs siblings against each other; and of the scores or
    grades by which it does, or where none does, of those of the samples that train, `equal_groups`, the share of groups
    that they do not tell apart, `mean_compared`, the mean of the first of them, and `compares_grades` where that was
    read from texts."""
    comparing = [node for node in flow.nodes if _compares_siblings(node)]
    facts = {"uses_groups": float(bool(comparing))}
    columns = [column for node in comparing for column in _verdicts(node, flow)] or _of_main_rows(flow)
    if not columns:
        return facts
    first = columns[0]
    rows = state.tables[first.rows]
    values = [rows.columns[column] for column in columns if column.rows == first.rows]
    equal = [all(are_equal(column[list(members)]) for column in values) for members in rows.groups.values()]
    facts["equal_groups"] = float(np.mean(equal))
    if np.isfinite(values[0]).any():
        facts["mean_compared"] = float(np.nanmean(values[0]))
    if flow.nodes[first.producer].kind is CallKind.GRADE:
        facts["compares_grades"] = 1.0
    return facts


def _compares_siblings(node: Node) -> bool:
    """Whether a call of the flow weighs the samples of a prompt against each other, and against nothing else."""
    is_compared = node.kind is CallKind.COMPUTE and node.grain is Grain.GROUP
    return is_compared and all(column.rows == node.rows for column in node.inputs.values())


def _verdicts(node: Node, flow: Dataflow) -> Iterator[Column]:
    """Scores and grades of whole samples that a call reads, as they are or after functions of the flow."""
    for column in node.inputs.values():
        source = flow.nodes[column.producer]
        if _says(source):
            yield column if column.level is Level.SAMPLE else source.outputs[0]
        elif source.kind is CallKind.COMPUTE and source.rows == node.rows:
            yield from _verdicts(source, flow)


def _of_main_rows(flow: Dataflow) -> list[Column]:
    return [node.outputs[0] for node in flow.nodes if node.rows == flow.main_rows.id and _says(node)]


def _says(node: Node) -> bool:
    return (node.kind is CallKind.SCORE and node.role in REWARD_ROLES) or node.kind is CallKind.GRADE

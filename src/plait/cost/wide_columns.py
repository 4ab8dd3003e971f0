"""What columns of several numbers per token (`Column.width`) add to calls: numbers that travel and that lie on devices,
and a loss's own pass over the head for the tokens that they name. Torch-free."""

from __future__ import annotations

from plait.dataflow import CallKind, Node, Top


def numbers_scored(node: Node) -> int:
    """Numbers that a SCORE call gives of a token."""
    return node.scoring.width if isinstance(node.scoring, Top) else 1


def numbers_read(node: Node) -> int:
    """Numbers of a token that a TRAIN call is sent beside ids and log-probs."""
    return sum(column.numbers for column in node.inputs.values())


def wide_numbers(node: Node) -> int:
    """Numbers of a token in the columns of several that a call reads or gives; 0: it has none such."""
    if node.kind is CallKind.SCORE:
        return node.scoring.width if isinstance(node.scoring, Top) else 0
    return sum(column.width or 0 for column in node.inputs.values())


def head_forwards(node: Node) -> int:
    """How often a forward of a call passes the head: a loss that reads such columns asks for the log-probs of other
    tokens (`LossBatch.logprobs_at`)."""
    return 2 if node.kind is CallKind.TRAIN and wide_numbers(node) else 1

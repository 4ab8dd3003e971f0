"""What a flow asks for: the losses and calls of its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.dataflow import CallKind, Dataflow, trace

ROLES = ("actor", "ref", "critic", "reward", "cost", "cost_critic")


def graph_of(flow: Callable[..., Any], options: Any = None) -> Dataflow:
    """The flow traced with every role filled."""
    return trace(flow, roles=ROLES, options=options)


def calls_of(flow: Callable[..., Any], options: Any = None) -> list[str]:
    """What the flow calls, in order."""
    return [node.call for node in graph_of(flow, options).nodes]


def loss_of(flow: Callable[..., Any], options: Any, role: str = "actor") -> Callable[..., Any]:
    """The loss that the flow trains `role` on, the first one if there are several."""
    nodes = graph_of(flow, options).calls(role)
    return next(node.fn for node in nodes if node.kind is CallKind.TRAIN and node.fn is not None)

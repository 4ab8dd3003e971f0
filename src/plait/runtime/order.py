"""Which calls of a flow must have ended before one may begin, so that any order that keeps to it computes the same."""

from __future__ import annotations

from collections.abc import Mapping

from plait.dataflow import CallKind, Dataflow, Node
from plait.runtime.roles import ModelRole, RewardRole, RoleRuntime


def needs_of(flow: Dataflow, roles: Mapping[str, RoleRuntime]) -> dict[int, frozenset[int]]:
    """Id of each node → ids of earlier ones that it waits for.

    A call waits for those that make what it reads; for earlier calls of its role that change weights, and where it
    changes them for all of its role; and of calls on the same samples for those that leave samples out (rewards),
    unless it scores each sample by itself: what it says of samples that are left out meanwhile is dropped.
    """
    needs: dict[int, frozenset[int]] = {}
    for node in flow.nodes:
        found = {column.producer for column in node.inputs.values()} | {node.rows}
        found |= {other.id for other in flow.nodes[: node.id] if _conflict(other, node, roles)}
        needs[node.id] = frozenset(found - {node.id})
    return needs


def _conflict(earlier: Node, later: Node, roles: Mapping[str, RoleRuntime]) -> bool:
    if earlier.role is not None and earlier.role == later.role:
        read_only = (CallKind.GENERATE, CallKind.SCORE)
        if (
            earlier.kind not in read_only
            or later.kind not in read_only
            or isinstance(roles.get(earlier.role), RewardRole)
        ):
            return True
    if earlier.kind is later.kind is CallKind.GENERATE:  # they draw prompts
        return True
    if not _reads(earlier) & _reads(later):
        return False
    drops = [isinstance(roles.get(str(node.role)), RewardRole) for node in (earlier, later)]
    by_sample = [scores_alone(node, roles) for node in (earlier, later)]
    return (drops[0] and not by_sample[1]) or (drops[1] and not by_sample[0])


def _reads(node: Node) -> set[int]:
    """Ids of the nodes whose samples it reads."""
    return {node.rows} | {column.rows for column in node.inputs.values()}


def scores_alone(node: Node, roles: Mapping[str, RoleRuntime]) -> bool:
    """Whether a model says something of each sample by itself."""
    return node.kind is CallKind.SCORE and isinstance(roles.get(str(node.role)), ModelRole)

"""Which training calls of a flow several roles do together, by one schedule (`fused`), and whether they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from plait.dataflow import CallKind, Dataflow, Node, Score
from plait.errors import ConfigError
from plait.schedule.needs import needs_of


def fused_calls(flow: Dataflow, roles: Sequence[str]) -> tuple[tuple[Node, ...], ...]:
    """Training calls that roles which train together do by one schedule: those of the first update of each role
    (`Dataflow.updates`), then of the second of each, while each has one. Each group is in the order of the flow."""
    groups = zip(*map(flow.updates, roles), strict=False)
    return tuple(tuple(sorted(chain.from_iterable(group), key=lambda node: node.id)) for group in groups)


def check_calls(flow: Dataflow, roles: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: calls that would train together depend on each other, or make unequal numbers of optimizer steps.
    """
    scored_by = {str(node.role) for node in flow.of_kind(CallKind.SCORE) if node.scoring is Score.SCORE}
    before = needs_of(flow, scored_by - flow.trained_roles)  # a critic that is asked for scores leaves no sample out
    for group in fused_calls(flow, roles):
        numbers = {node.id for node in group}
        for node in group:
            needed = _all_before(node.id, before)
            others = (flow.nodes[number] for number in sorted(needed & numbers))
            if other := next((other for other in others if other.role != node.role), None):
                raise ConfigError(
                    f"{node.call} cannot train together with {other.call}: the flow `{flow.name}` has it wait for that"
                )
        steps = [node.training.passes for node in group]
        if len(set(steps)) > 1:
            counts = ", ".join(f"{node.call} {count}" for node, count in zip(group, steps, strict=True))
            raise ConfigError(
                f"expected as many optimizer steps (mini_batches x epochs) in a training step of all that train "
                f"together, found {counts}"
            )


def _all_before(node: int, before: Mapping[int, frozenset[int]]) -> set[int]:
    earlier: set[int] = set()
    waiting = [node]
    while waiting:
        new = before[waiting.pop()] - earlier
        earlier |= new
        waiting += new
    return earlier

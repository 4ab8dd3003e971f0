"""What brings roles that follow another role towards its weights (`reference.sync_every`), in the mean step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.cost.costs import Costs
from plait.layout.mesh import Layout
from plait.simulator.places import Place
from plait.simulator.step_graph import StepGraph
from plait.simulator.step_weights import Weights


@dataclass(frozen=True)
class Following:
    """
    mask:    bit r: rank r takes part
    seconds, bytes: of a move at the end of a step, divided by the steps from one to the next
    """

    role: str
    mask: int
    seconds: float
    bytes: int


def followings(
    graph: StepGraph, places: Sequence[Place], weights: Sequence[Weights], costs: Costs
) -> tuple[Following, ...]:
    """The moves of roles that follow another: from the averaged masters, of which each rank of dp that trains has a
    share, to the role's home (`workers.announcer.Follow`), and from there to its copies that stay. What has to come
    from host memory for them is left out.

    Args:
        places: of each slot, in their order; weights: of each family.
    """
    found = []
    for role, followed in graph.follows.items():
        train = graph.slots_of(followed).get("train")
        if train is None or role not in graph.roles:
            continue
        source, home = places[train].layouts[0], places[graph.home_of(role)]
        masters = Layout(source.mesh, source.parallelism, source.parallelism.dp > 1)
        move = costs.move(followed, masters, home.layouts[0])
        seconds, num_bytes, mask = move.seconds, move.bytes, places[train].mask | home.mask
        for copies in (copies for of_family in weights for copies in of_family.seldom if copies.role == role):
            seconds, num_bytes, mask = seconds + copies.seconds, num_bytes + copies.bytes, mask | copies.movers
        every = graph.follow_steps
        found.append(Following(role, mask, seconds / every, round(num_bytes / every)))
    return tuple(found)

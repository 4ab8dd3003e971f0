"""What ranks of a simulated step hold for their connections, as `cost.placed` counts it of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plait.cost.connections import Connected, Placing, Sending
from plait.cost.costs import Amount, Costs
from plait.layout.groups import all_of
from plait.simulator.places import Place, ranks_of
from plait.simulator.step_graph import StepGraph

if TYPE_CHECKING:
    from plait.simulator.step_weights import Weights


def connection_bytes(
    graph: StepGraph, places: Sequence[Place], weights: Sequence[Weights], costs: Costs
) -> tuple[Amount, Amount]:
    """[ranks] of `Connections.group_bytes`, and of `message_bytes`; 0 where nothing takes anything. The layout of roles
    that train together is taken to have the groups that theirs have.

    Args:
        places: of each slot, in their order.
    """
    if costs.connections is None:
        return 0, 0
    placings = set()
    for place in places:
        slot = graph.slots[place.slot]
        trains = slot.role if slot.mode == "train" else ""
        placings |= {Placing(layout, slot.mode == "decode", trains) for layout in place.layouts}
    sharing = [
        place.layouts
        for place in places
        if (graph.gathers or graph.rebalances or place.is_apart)
        and graph.slots[place.slot].mode == "decode"
        and sum(layout.parallelism.dp for layout in place.layouts) > 1
    ]
    placings |= {Placing(all_of(layouts)) for layouts in sharing}
    if sharing and graph.gathers:
        placings |= {Placing(places[_scoring(graph, role)].layouts[0], apart=True) for role in graph.roles}
    home = lambda role: ranks_of(places[graph.home_of(role)].mask)
    sendings = [
        Sending(home(copies.role), ranks_of(copies.receivers))
        for of_family in weights
        for copies in (*of_family.copies, *of_family.seldom)
    ]
    for role, followed in graph.follows.items():
        if "train" in graph.slots_of(followed) and role in graph.roles:
            sendings.append(Sending(home(followed), home(role)))
    num_ranks, connected = len(places[0].parts), Connected(placings, sendings, sharing)
    groups, messages = costs.connections.group_bytes(placings), costs.connections.message_bytes(connected)
    return groups[:num_ranks], messages[:num_ranks]


def _scoring(graph: StepGraph, role: str) -> int:
    """The slot in whose layout a role scores, whether it is asked to or not."""
    return graph.slots_of(role).get("score", graph.home_of(role))

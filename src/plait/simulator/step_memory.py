"""Peak memory of each rank in a step, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plait.cost.costs import Amount, Costs
from plait.cost.generation_memory import EngineBytes
from plait.cost.kept_sets import SETS
from plait.cost.working_memory import KEPT, MESSAGES, NCCL
from plait.simulator.places import KEEP, WHOLE, Floats, Place, trained_together
from plait.simulator.step_connections import connection_bytes
from plait.simulator.step_graph import StepGraph
from plait.simulator.step_weights import Weights, kept_bytes

ENGINE = "engine: draft model, or another engine"
POOLS = "pools that stay, with CUDA graphs"


@dataclass(frozen=True)
class RankMemory:
    """terms: of `peak_bytes`, which they sum to"""

    rank: int
    peak_bytes: int
    limit_bytes: int
    terms: dict[str, int]

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, eq=False)
class Held:
    """[ranks] bytes. most: at the fullest moment; slack: what may come on top"""

    most: Floats
    slack: Mapping[str, Amount]

    @property
    def peak(self) -> Floats:
        peak = self.most
        for count in self.slack.values():
            peak = peak + count
        return peak


def held_bytes(graph: StepGraph, places: Sequence[Place], weights: Sequence[Weights], costs: Costs) -> Held:
    """What each rank holds. What a call does not need has left its devices when it begins, so the most is held during
    some call, or during calls that train together, or while weights are moved, whatever their order; or when all models
    have been read."""
    standing, messages = standing_bytes(graph, places, weights, costs)
    kept = kept_bytes(weights) + standing + messages + pool_bytes(graph, places)
    read = sum((of_family.read for of_family in weights), np.maximum.reduce([of_family.state for of_family in weights]))
    read = most = read + standing
    present = {slot: num_bytes for of_family in weights for slot, num_bytes in of_family.present.items()}
    activations = _activations(graph, places, [place.activations for place in places])
    widened = most
    for slot, place in enumerate(places):
        beside = activations if costs.keeps_freed and graph.slots[slot].mode == "decode" else 0
        taken = kept + present[slot] + working_bytes(graph, place) + beside * (place.parts >= 0)
        most, widened = np.maximum(most, taken), np.maximum(widened, taken + place.widened)
    for group in trained_together(graph, places):
        beside = np.maximum.reduce([places[slot].working - places[slot].activations for slot in group])
        most = np.maximum(most, kept + beside + sum(present[slot] + places[slot].activations for slot in group))
    for of_family in weights:
        if of_family.moving is not None:
            most = np.maximum(most, kept + of_family.moving)
    slack = costs.slack(
        activations=activations,
        plain=_activations(graph, places, [place.plain for place in places]),
        weights=np.maximum.reduce([of_family.largest for of_family in weights]),
        working=most - read,
        moves=len(kept) > 1 or any(of_family.units for of_family in weights),
        widened=on_engines(graph, places, costs, lambda engine: engine.widened) + np.maximum(0, widened - most),
    )
    return Held(most, slack)


def _activations(graph: StepGraph, places: Sequence[Place], of_slots: Sequence[Floats]) -> Floats:
    """Those of the call with most of them, or of calls that train together."""
    together = [np.sum([of_slots[slot] for slot in group], axis=0) for group in trained_together(graph, places)]
    return np.maximum.reduce([*of_slots, *together])


def pool_bytes(graph: StepGraph, places: Sequence[Place]) -> Floats:
    """[ranks] of what generations take beside weights, as far as that stays; it is there from the first rollout on."""
    none = np.zeros(len(places[0].working))
    staying = [place for place in places if graph.pools_stay and graph.slots[place.slot].mode == "decode"]
    return sum((place.working - place.passing for place in staying), none)


def working_bytes(graph: StepGraph, place: Place) -> Floats:
    """[ranks] that a call takes beside what is always there."""
    is_there = graph.pools_stay and graph.slots[place.slot].mode == "decode"
    return place.passing if is_there else place.working


def standing_bytes(
    graph: StepGraph, places: Sequence[Place], weights: Sequence[Weights], costs: Costs
) -> tuple[Amount, Amount]:
    """[ranks], or of each, of the process itself with its groups, and of an engine where it generates; beside that,
    behind the reading of models, of messages, and of what samples were drawn from."""
    engines = on_engines(graph, places, costs, lambda engine: engine.held)
    groups, messages = connection_bytes(graph, places, weights, costs)
    return sum(costs.process_terms.values()) + engines + groups, messages + set_bytes(places)


def set_bytes(places: Sequence[Place]) -> Floats:
    """[ranks] of what the samples of each were drawn from; the first has all."""
    sets = np.maximum.reduce([place.sets for place in places])
    sets[0] = max(sets[0], sum(cost.all_set_bytes for place in places for cost in place.costs))
    return sets


def on_engines(
    graph: StepGraph, places: Sequence[Place], costs: Costs, num_bytes: Callable[[EngineBytes], int]
) -> Amount:
    """[ranks] of what engines take beside the models of roles, of each role's on the ranks where it draws samples; 0
    where none takes anything."""
    total: Amount = 0
    for slot, place in zip(graph.slots, places, strict=True):
        engine = costs.engine_bytes.get(slot.role) if slot.mode == "decode" else None
        if engine is not None and (count := num_bytes(engine)):
            has_one = place.draws & (place.parts == WHOLE) if engine.is_whole else place.draws
            total = total + count * has_one.astype(np.float64)
    return total


def memory_of(graph: StepGraph, places: Sequence[Place], weights: Sequence[Weights], costs: Costs) -> list[RankMemory]:
    """The memory of each rank."""
    held = held_bytes(graph, places, weights, costs)
    peak, cluster = held.peak, costs.cluster
    left = np.zeros(len(peak))
    if costs.keeps_freed:
        left = _activations(graph, places, [place.activations for place in places])
    none = np.zeros(len(peak))
    engine = none + on_engines(graph, places, costs, lambda engine: engine.held)
    groups, messages = (none + count for count in connection_bytes(graph, places, weights, costs))
    sets = set_bytes(places)
    return [
        RankMemory(
            rank,
            int(peak[rank]),
            cluster.memory_of(rank),
            _counted(
                {**costs.process_terms, NCCL: costs.process_terms.get(NCCL, 0) + float(groups[rank])}
                | {ENGINE: float(engine[rank])}
                | _terms(rank, graph, places, weights, left, {MESSAGES: messages[rank], SETS: sets[rank]})
                | _of_rank(held.slack, rank)
            ),
        )
        for rank in range(len(peak))
    ]


def _of_rank(slack: Mapping[str, Amount], rank: int) -> dict[str, float]:
    return {name: count if isinstance(count, int) else float(count[rank]) for name, count in slack.items()}


def _counted(terms: Mapping[str, float]) -> dict[str, int]:
    return {name: int(count) for name, count in terms.items() if count}


def _terms(
    rank: int,
    graph: StepGraph,
    places: Sequence[Place],
    weights: Sequence[Weights],
    left: Floats,
    beside: Mapping[str, float],
) -> dict[str, float]:
    """Terms of the most that a rank holds: what stays, by role, and what the largest call needs beside.

    Args:
        left: [ranks] of activations, what stays with a process that generates.
        beside: of this rank, what is there once models have been read.
    """
    terms_of_rank: dict[str, float] = {}
    for family in graph.families:
        seen: set[int] = set()
        for slot in family:
            place, role = places[slot], graph.slots[slot].role
            number = int(place.parts[rank])
            kept = any(places[other].parts[rank] == number and places[other].after[rank] == KEEP for other in family)
            if graph.nested and number != WHOLE and not place.has_shares:
                kept &= not any(
                    places[other].parts[rank] == WHOLE and places[other].after[rank] == KEEP for other in family
                )
            if number >= 0 and number not in seen and kept:
                seen.add(number)
                terms_of_rank[f"{role}: weights"] = terms_of_rank.get(f"{role}: weights", 0.0) + place.weights[rank]
            if place.state is not None and place.state[rank] and place.after[rank] == KEEP:
                terms_of_rank[f"{role}: optimizer state"] = place.state[rank]
    away = sum(of_family.read[rank] - of_family.kept[rank] for of_family in weights)
    state = max(of_family.state[rank] for of_family in weights)
    pools = {POOLS: pool_bytes(graph, places)[rank], **beside}
    extra: list[dict[str, float]] = [{"reading models: what leaves later": away + state}]
    for family, of_family in zip(graph.families, weights, strict=True):
        for slot in family:
            call_slot = graph.slots[slot]
            stays = float(left[rank]) if call_slot.mode == "decode" and places[slot].parts[rank] >= 0 else 0.0
            extra.append(
                {
                    f"{call_slot}: brought back": of_family.present[slot][rank],
                    f"{call_slot}": working_bytes(graph, places[slot])[rank],
                }
                | {KEPT: stays}
                | pools
            )
        if of_family.moving is not None:
            extra.append({f"{graph.slots[family[0]].role}: copies that move": of_family.moving[rank]} | pools)
    present = {slot: num_bytes for of_family in weights for slot, num_bytes in of_family.present.items()}
    for group in trained_together(graph, places):
        names = {slot: str(graph.slots[slot]) for slot in group}
        extra.append(
            {f"{name}: brought back": present[slot][rank] for slot, name in names.items()}
            | {name: places[slot].activations[rank] for slot, name in names.items()}
            | {"one head at work": max(places[slot].working[rank] - places[slot].activations[rank] for slot in group)}
            | pools
        )
    return terms_of_rank | max(extra, key=lambda terms: sum(terms.values()))

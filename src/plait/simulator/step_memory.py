"""What each rank holds in a step: at its most, and of what that is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from plait.simulator.places import KEEP, WHOLE, Floats, Place, trained_together
from plait.simulator.step_graph import StepGraph

if TYPE_CHECKING:
    from plait.simulator.step_weights import Weights


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


def peak_bytes(graph: StepGraph, places: Sequence[Place], weights: Sequence[Weights]) -> Floats:
    """[ranks] the most that each holds. What a call does not need has left its devices when it begins, so the most is
    held during some call, or during calls that train together, or while weights are moved, whatever their order."""
    kept = kept_bytes(weights)
    peak = kept
    present = {slot: held for of_family in weights for slot, held in of_family.present.items()}
    for slot, place in enumerate(places):
        peak = np.maximum(peak, kept + present[slot] + place.working)
    for group in trained_together(graph, places):
        peak = np.maximum(peak, kept + sum(present[slot] + places[slot].working for slot in group))
    for of_family in weights:
        if of_family.moving is not None:
            peak = np.maximum(peak, kept + of_family.moving)
    return peak


def kept_bytes(weights: Sequence[Weights]) -> Floats:
    """[ranks] that are always there."""
    return sum((of_family.kept for of_family in weights[1:]), weights[0].kept)


def memory_of(
    graph: StepGraph, places: Sequence[Place], weights: Sequence[Weights], limit_bytes: int
) -> list[RankMemory]:
    """The memory of each rank."""
    peak = peak_bytes(graph, places, weights)
    return [
        RankMemory(rank, int(peak[rank]), limit_bytes, _terms(rank, graph, places, weights))
        for rank in range(len(peak))
    ]


def _terms(rank: int, graph: StepGraph, places: Sequence[Place], weights: Sequence[Weights]) -> dict[str, int]:
    """Terms of the most that a rank holds: what stays, by role, and what the largest call needs beside."""
    terms_of_rank: dict[str, float] = {}
    for family in graph.families:
        seen: set[int] = set()
        for slot in family:
            place, role = places[slot], graph.slots[slot].role
            part = int(place.parts[rank])
            kept = any(places[other].parts[rank] == part and places[other].after[rank] == KEEP for other in family)
            if graph.nested and part != WHOLE:
                kept &= not any(
                    places[other].parts[rank] == WHOLE and places[other].after[rank] == KEEP for other in family
                )
            if part >= 0 and part not in seen and kept:
                seen.add(part)
                terms_of_rank[f"{role}: weights"] = terms_of_rank.get(f"{role}: weights", 0.0) + place.weights[rank]
            if place.state is not None and place.state[rank] and place.after[rank] == KEEP:
                terms_of_rank[f"{role}: optimizer state"] = place.state[rank]
    extra: list[dict[str, float]] = [{}]
    for family, of_family in zip(graph.families, weights, strict=True):
        for slot in family:
            what = graph.slots[slot]
            extra.append(
                {f"{what}: brought back": of_family.present[slot][rank], f"{what}": places[slot].working[rank]}
            )
        if of_family.moving is not None:
            extra.append({f"{graph.slots[family[0]].role}: copies that move": of_family.moving[rank]})
    present = {slot: held for of_family in weights for slot, held in of_family.present.items()}
    for group in trained_together(graph, places):
        names = {slot: str(graph.slots[slot]) for slot in group}
        extra.append(
            {f"{name}: brought back": present[slot][rank] for slot, name in names.items()}
            | {name: places[slot].working[rank] for slot, name in names.items()}
        )
    terms_of_rank |= max(extra, key=lambda terms: sum(terms.values()))
    return {what: int(count) for what, count in terms_of_rank.items() if count}

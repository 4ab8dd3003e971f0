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
    present = {slot: held for one in weights for slot, held in one.present.items()}
    for slot, place in enumerate(places):
        peak = np.maximum(peak, kept + present[slot] + place.working)
    for group in trained_together(graph, places):
        peak = np.maximum(peak, kept + sum(present[slot] + places[slot].working for slot in group))
    for one in weights:
        if one.moving is not None:
            peak = np.maximum(peak, kept + one.moving)
    return peak


def kept_bytes(weights: Sequence[Weights]) -> Floats:
    """[ranks] that are always there."""
    return sum((one.kept for one in weights[1:]), weights[0].kept)


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
    found: dict[str, float] = {}
    for family in graph.families:
        seen: set[int] = set()
        for slot in family:
            place, role = places[slot], graph.slots[slot].role
            part = int(place.parts[rank])
            kept = any(places[one].parts[rank] == part and places[one].after[rank] == KEEP for one in family)
            if graph.nested and part != WHOLE:
                kept &= not any(places[one].parts[rank] == WHOLE and places[one].after[rank] == KEEP for one in family)
            if part >= 0 and part not in seen and kept:
                seen.add(part)
                found[f"{role}: weights"] = found.get(f"{role}: weights", 0.0) + place.weights[rank]
            if place.state is not None and place.state[rank] and place.after[rank] == KEEP:
                found[f"{role}: optimizer state"] = place.state[rank]
    extra: list[dict[str, float]] = [{}]
    for family, one in zip(graph.families, weights, strict=True):
        for slot in family:
            what = graph.slots[slot]
            extra.append({f"{what}: brought back": one.present[slot][rank], f"{what}": places[slot].working[rank]})
        if one.moving is not None:
            extra.append({f"{graph.slots[family[0]].role}: copies that move": one.moving[rank]})
    present = {slot: held for one in weights for slot, held in one.present.items()}
    for group in trained_together(graph, places):
        names = {slot: str(graph.slots[slot]) for slot in group}
        extra.append(
            {f"{name}: brought back": present[slot][rank] for slot, name in names.items()}
            | {name: places[slot].working[rank] for slot, name in names.items()}
        )
    found |= max(extra, key=lambda terms: sum(terms.values()))
    return {what: int(count) for what, count in found.items() if count}

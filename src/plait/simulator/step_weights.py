"""Weights of a step: which copies are brought from a role's home, what leaves its devices, and who holds how much.

The rules are those of a run (`cost.offload_policy`, `workers.announcer`): one part of a model on a rank is held once,
whoever computes with it, and the most careful word of theirs says what becomes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.cost.costs import Costs
from plait.simulator.places import DROP, KEEP, OFFLOAD, WHOLE, Floats, Ints, Place
from plait.simulator.step_graph import StepGraph


@dataclass(frozen=True, eq=False)
class Unit:
    """Weights, or optimizer state, that are not always on their devices.

    mask:    bit r: on rank r
    slots:   that need it
    load_s:  to bring it from host memory; leave_s: to copy it there
    copies:  which are gone when it leaves; None: they are not
    """

    name: str
    role: str
    mask: int
    slots: frozenset[int]
    load_s: float
    leave_s: float
    copies: Copies | None = None


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies of a role's weights that are moved from its home together.

    slots:  that need them
    movers: bit r: rank r takes part; receivers: it gets weights of which it does not have the part
    drops:  whether they are dropped after each use
    """

    role: str
    slots: frozenset[int]
    movers: int
    seconds: float
    bytes: int
    drops: bool
    receivers: int = 0


@dataclass(frozen=True, eq=False)
class Weights:
    """Where the weights of roles lie that share them.

    kept:    [ranks] bytes that are always there
    present: slot → [ranks] bytes beside, while its calls run
    moving:  [ranks] bytes beside `kept` while copies are moved
    read:    [ranks] bytes when all models have been read: every part, and state that stays
    state:   [ranks] bytes of the largest state that leaves, which is made beside `read`
    largest: [ranks] bytes of the largest part
    seldom:  copies that stay, of roles that follow another: moved when these do
    """

    kept: Floats
    read: Floats
    state: Floats
    largest: Floats
    present: dict[int, Floats]
    moving: Floats | None
    units: tuple[Unit, ...]
    copies: tuple[Copies, ...]
    seldom: tuple[Copies, ...] = ()


def weights_of(graph: StepGraph, costs: Costs, places: Sequence[Place]) -> Weights:
    """
    Args:
        places: of all slots of a family (`StepGraph.families`).
    """
    merged = careful(places)
    kept, read, away = np.zeros((3, len(places[0].weights)))
    for number, place in enumerate(places):
        new = place.parts >= 0
        for other in places[:number]:
            new &= place.parts != other.parts
        if graph.nested and not place.has_shares:
            new &= ~_in_whole(number, places, merged)
        kept += np.where(new & (merged[number] == KEEP), place.weights, 0.0)
        read += np.where(new, place.weights, 0.0)
    present = {p.slot: np.where(m != KEEP, p.weights, 0.0) for p, m in zip(places, merged, strict=True)}
    every = [copy for role in _roles(graph, places) for copy in _copies(graph, costs, role, places, merged)]
    seldom = [copy for copy in every if copy.role not in graph.trained and not copy.drops]
    copies = [copy for copy in every if copy not in seldom]
    units = _units(graph, places, merged, copies)
    for place in places:
        if place.state is not None:
            state = graph.slots[place.slot].role
            stays = place.placements[0].after == "keep"
            if stays:
                kept, read = kept + place.state, read + place.state
            else:
                away = np.maximum(away, place.state)
                present[place.slot] = present[place.slot] + place.state
                slots, seconds = frozenset({place.slot}), place.state_s
                units.append(Unit(f"{state}.state", state, place.mask, slots, seconds, seconds))
    moving = None
    if units and copies:
        moving = np.zeros(len(kept))
        for moved in copies:
            role = [p for p in places if graph.slots[p.slot].role == moved.role]
            for p in role:
                if p.slot in moved.slots or p.slot == graph.home_of(moved.role):
                    moving += np.where(merged[places.index(p)] != KEEP, p.weights, 0.0)
    largest = np.maximum.reduce([place.weights for place in places])
    return Weights(kept, read, away, largest, present, moving, tuple(units), tuple(copies), tuple(seldom))


def kept_bytes(weights: Sequence[Weights]) -> Floats:
    """[ranks] of weights and optimizer state that are always there."""
    return sum((of_family.kept for of_family in weights[1:]), weights[0].kept)


def _in_whole(number: int, places: Sequence[Place], merged: Sequence[Ints]) -> NDArray[np.bool_]:
    """[ranks] where a part that stays lies in the whole model, which stays there too."""
    place, in_whole = places[number], np.zeros(len(places[number].parts), bool)
    for other, after in zip(places, merged, strict=True):
        in_whole |= (other.parts == WHOLE) & (after == KEEP)
    return in_whole & (place.parts != WHOLE) & (merged[number] == KEEP)


def _roles(graph: StepGraph, places: Sequence[Place]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(graph.slots[place.slot].role for place in places))


def careful(places: Sequence[Place]) -> list[Ints]:
    """What becomes of the part of each place, for all that compute with it; arguments as of `weights_of`."""
    if not any(place.leaves for place in places):
        return [place.after for place in places]
    merged = []
    for place in places:
        after = place.after
        for other in places:
            if other is not place:
                shared = (other.parts == place.parts) & (place.parts >= 0)
                after = np.where(shared, np.minimum(after, other.after), after)
        merged.append(after)
    return merged


def _copies(graph: StepGraph, costs: Costs, role: str, places: Sequence[Place], merged: Sequence[Ints]) -> list[Copies]:
    mine = {p.slot: (p, m) for p, m in zip(places, merged, strict=True) if graph.slots[p.slot].role == role}
    home = mine[graph.home_of(role)][0]
    everywhere = 0
    for place, _ in mine.values():
        everywhere |= place.mask
    groups: dict[int, list[Place]] = {}
    for place, after in mine.values():
        outside = (place.parts >= 0) & (place.parts != home.parts)
        if not outside.any():
            continue
        word = int(after[outside].min())
        if role not in graph.trained and role not in graph.follows and word != DROP:
            continue  # a frozen role's are read from its checkpoint
        groups.setdefault(word, []).append(place)
    copies = []
    for word, members in groups.items():
        if word == KEEP:
            copies.append(_moved(costs, role, home, members, everywhere, drops=False))
            continue
        for same in _by_parts(members):
            copies.append(_moved(costs, role, home, same, everywhere, drops=word == DROP))
    return copies


def _by_parts(places: Sequence[Place]) -> list[list[Place]]:
    groups: list[list[Place]] = []
    for place in places:
        same = next((group for group in groups if np.array_equal(group[0].parts, place.parts)), None)
        if same is None:
            groups.append([place])
        else:
            same.append(place)
    return groups


def _moved(costs: Costs, role: str, home: Place, members: Sequence[Place], everywhere: int, *, drops: bool) -> Copies:
    targets = dict.fromkeys(layout for place in members for layout in place.layouts)
    moves = [costs.move(role, home.layouts[0], target) for target in targets]
    outside = np.logical_or.reduce([(place.parts >= 0) & (place.parts != home.parts) for place in members])
    return Copies(
        role,
        frozenset(place.slot for place in members),
        everywhere,
        sum(move.seconds for move in moves),
        sum(move.bytes for move in moves),
        drops,
        _mask(outside),
    )


def _units(graph: StepGraph, places: Sequence[Place], merged: Sequence[Ints], copies: Sequence[Copies]) -> list[Unit]:
    """Parts that several places share are one unit."""
    units: list[Unit] = []
    leaving = [(p, m) for p, m in zip(places, merged, strict=True) if (m != KEEP).any()]
    for same in _by_parts([p for p, _ in leaving]):
        after = next(m for p, m in leaving if p is same[0])
        role = graph.slots[same[0].slot].role
        slots = frozenset(place.slot for place in same)
        load_s = max(place.load_s for place in same)
        for word in (OFFLOAD, DROP):
            ranks = (after == word) & (same[0].parts >= 0)
            if not ranks.any():
                continue
            mask = _mask(ranks)
            dropped = (
                next((copy for copy in copies if copy.drops and copy.slots & slots), None) if word == DROP else None
            )
            if dropped is not None:
                units.append(Unit(f"{role}.weights", role, mask, slots, 0.0, 0.0, dropped))
            else:
                leave_s = load_s if role in graph.trained or role in graph.follows else 0.0
                units.append(Unit(f"{role}.weights", role, mask, slots, load_s, leave_s))
    return units


def _mask(ranks: NDArray[np.bool_]) -> int:
    """Bit r: whether rank r is among these."""
    return int.from_bytes(np.packbits(ranks, bitorder="little").tobytes(), "little")

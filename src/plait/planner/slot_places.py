"""Where each slot of a plan can be: its meshes, and its forms on them. Moves of the search are made of these."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random

from plait.layout.mesh import Parallelism
from plait.planner.plan_space import PlanSpace
from plait.schedule.plan import After
from plait.simulator.places import Place

NEAR_THE_FASTEST = 0.45
"""That a form, or a cut, is passed over for the next in the order of their seconds."""
ANOTHER_WORD = 0.2
"""That what becomes of a slot's memory is drawn anew with its place."""
DIVIDED = 0.4
"""That prompts get devices of their own where that may take less time."""


class SlotPlaces:
    """Meshes and forms of a space, slot by slot; what is drawn is drawn from the caller's generator.

    meshes:  for each slot, the meshes that it can be on; known: the same as sets
    """

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        slots = range(len(space.graph.slots))
        self.meshes = [[ranks for ranks in space.meshes if space.forms.of(slot, ranks)] for slot in slots]
        self.known = [frozenset(meshes) for meshes in self.meshes]
        self._nearby: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}

    def between(self, cuts: Sequence[int]) -> list[tuple[int, ...]]:
        """Legal meshes that begin and end at two of these ranks."""
        ends = [(one, other) for n, one in enumerate(cuts) for other in cuts[n + 1 :]]
        return [self.space.by_ends[end] for end in ends if end in self.space.by_ends]

    def near_of(self, slot: int, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Neighbours of a mesh on which a slot can be."""
        key = (slot, min(ranks), len(ranks))
        if key not in self._nearby:
            near = self.space.neighbours(ranks)
            self._nearby[key] = [other for other in near if other in self.known[slot]]
        return self._nearby[key]

    def resized(self, place: Place, first: int, end: int) -> Place | None:
        """The slot of a place from one rank to another, cut as it is if it can be, else as fast as it can be there.
        None where it cannot be."""
        ranks, sizes = self.space.by_ends.get((first, end)), place.layouts[0].parallelism
        if ranks is None or ranks not in self.known[place.slot]:
            return None
        if place.is_apart and (divisions := self.space.divisions.of(place.slot, ranks)):
            return self.space.divisions.place(place.slot, ranks, divisions[0], after_of(place))
        forms = self.space.forms.of(place.slot, ranks)
        alike = (form for form in forms if (form.parallelism.tp, form.parallelism.pp) == (sizes.tp, sizes.pp))
        return self.space.place(place.slot, ranks, next(alike, forms[0]), after_of(place))

    def least_s(self, slot: int, first: int, end: int) -> float:
        """Seconds of a slot from one rank to another, as fast as it can be there; infinite where it cannot be."""
        ranks = self.space.by_ends[first, end]
        return self.space.forms.of(slot, ranks)[0].seconds if ranks in self.known[slot] else inf

    def in_layout(self, place: Place, ranks: tuple[int, ...], sizes: Parallelism) -> Place | None:
        """The slot of a place in this layout. None where it cannot be."""
        forms = (form for form in self.space.forms.of(place.slot, ranks) if form.parallelism == sizes)
        form = next(forms, None)
        return None if form is None else self.space.place(place.slot, ranks, form, after_of(place))

    def on(
        self, slot: int, ranks: tuple[int, ...], rng: Random, after: After, *, otherwise: bool = False
    ) -> Place | None:
        """A slot on these devices: the fastest forms are drawn most often. None where it cannot be.

        Args:
            otherwise: not always in its fastest form.
        """
        forms = self.space.forms.of(slot, ranks)
        if not forms:
            return None
        if rng.random() < ANOTHER_WORD:
            after = rng.choice(self.space.afters(slot))
        divisions = self.space.divisions.of(slot, ranks)
        if divisions and rng.random() < DIVIDED:
            return self.space.divisions.place(slot, ranks, divisions[passed_over(rng) % len(divisions)], after)
        number = 0
        if otherwise or rng.random() < 0.5:
            number = passed_over(rng)
            if rng.random() < 0.15:
                number = rng.randrange(len(forms))
        return self.space.place(slot, ranks, forms[number % len(forms)], after)


def passed_over(rng: Random) -> int:
    """How many of those that are drawn from, the best first, are passed over before one is taken."""
    number = 0
    while rng.random() < NEAR_THE_FASTEST:
        number += 1
    return number


def after_of(place: Place) -> After:
    """What becomes of its memory."""
    return place.placements[0].after


def ranks_of(place: Place) -> tuple[int, ...]:
    """All ranks of a place: in the order of its layout if it has one placement, else ascending."""
    return place.placements[0].ranks if len(place.placements) == 1 else tuple(range(*ends_of(place)))


def ends_of(place: Place) -> tuple[int, int]:
    """The first rank, and the one behind the last."""
    return (place.mask & -place.mask).bit_length() - 1, place.mask.bit_length()

"""Plans near a plan: one call elsewhere or otherwise, two calls, a role moved or cut as one, devices exchanged or
parted anew, memory kept or let go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from plait.layout.mesh import Parallelism
from plait.planner.plan_space import PlanSpace
from plait.planner.slot_forms import Form
from plait.schedule.plan import After
from plait.simulator.places import Place

State = tuple[Place, ...]
Changes = dict[int, Place | None]
"""Slot → where it is from now on; None: where it was."""

NEAR_THE_FASTEST = 0.45
"""That a form, or a cut, is passed over for the next in the order of their seconds."""
ANOTHER_WORD = 0.2
"""That what becomes of a slot's memory is drawn anew with its place."""

NEAR_CUTS = 6
"""Devices to which a cut may move."""


class Moves:
    """Random changes of plans within a space. All that is drawn is drawn from the caller's generator.

    Args:
        estimate: about what a plan is worth, in a small part of the time of playing it; the less the better.
    """

    def __init__(self, space: PlanSpace, estimate: Callable[[State], float]) -> None:
        self.space, self._estimate = space, estimate
        self.graph = space.graph
        self._slots = range(len(self.graph.slots))
        self._meshes = [[ranks for ranks in space.meshes if space.forms.of(slot, ranks)] for slot in self._slots]
        """The meshes on which each slot can be."""
        self._known = [frozenset(meshes) for meshes in self._meshes]
        self._nearby: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
        self._by_ends = {(ranks[0], ranks[-1] + 1): ranks for ranks in space.meshes}
        self._devices = space.problem.num_devices
        self._cuts = sorted({ranks[0] for ranks in space.meshes})
        train = {role: self.graph.slots_of(role)["train"] for pair in space.problem.pairs for role in pair}
        self._pairs = [(train[one], train[other]) for one, other in space.problem.pairs]
        self._roles = [tuple(self.graph.slots_of(role).values()) for role in self.graph.roles]
        self._role_of = {slot: slots for slots in self._roles for slot in slots}
        self._kinds: tuple[tuple[float, Callable[[State, Random], Changes]], ...] = (
            (0.12, self._one_reformed),
            (0.25, self._role_reformed),
            (0.39, self._one_moved),
            (0.46, self._some_changed),
            (0.54, self._like_another),
            (0.61, self._role_moved),
            (0.66, self._exchanged),
            (0.74, self._cut_moved),
            (0.94, self._parted),
            (0.97, self._fused if self._pairs else self._afters_changed),
            (1.0, self._afters_changed),
        )
        """Kinds of moves, each drawn with a number from [0, 1) below its own that is not below the one before."""

    def greedy(self) -> State | None:
        """Each slot by itself as fast as it can be anywhere."""
        if not all(self._meshes):
            return None
        places = []
        for slot in self._slots:
            ranks = min(self._meshes[slot], key=lambda mesh: (self.space.forms.of(slot, mesh)[0].seconds, mesh))
            places.append(self.space.place(slot, ranks, self.space.forms.of(slot, ranks)[0]))
        return tuple(places)

    def random(self, rng: Random) -> State | None:
        """A plan drawn at random: the devices cut in a few parts, and each role on one of them or on all."""
        if not all(self._meshes):
            return None
        cuts = sorted({0, self._devices, *(rng.choice(self._cuts) for _ in range(rng.choice((0, 1, 1, 2, 3))))})
        parts = [ranks for ranks in self._between(cuts) if len(ranks) < self._devices or len(cuts) == 2]
        together = rng.random()
        places: list[Place] = []
        for slot, slot_of_role in enumerate(self.graph.slots):
            same = next((p for p in places if self.graph.slots[p.slot].role == slot_of_role.role), None)
            ranks = same.placements[0].ranks if same is not None and rng.random() < together else None
            if ranks is None or ranks not in self._known[slot]:
                mine = [mesh for mesh in parts if mesh in self._known[slot]] or self._meshes[slot]
                ranks = rng.choice(mine)
            place = self._on(slot, ranks, rng, "keep")
            assert place is not None, "a mesh that a slot can be on has a form"
            places.append(place)
        return self.space.lawful(sorted(places, key=lambda place: place.slot))

    def _between(self, cuts: Sequence[int]) -> list[tuple[int, ...]]:
        """Legal meshes that begin and end at these."""
        ends = [(one, other) for n, one in enumerate(cuts) for other in cuts[n + 1 :]]
        return [self._by_ends[end] for end in ends if end in self._by_ends]

    def near(self, state: State, rng: Random) -> State:
        """A plan that differs in little."""
        kind = rng.random()
        move = next(move for until, move in self._kinds if kind < until)
        return self._changed(state, move(state, rng))

    def _one_reformed(self, state: State, rng: Random) -> Changes:
        slot = rng.choice(self._slots)
        return {slot: self._reformed(state[slot], rng)}

    def _one_moved(self, state: State, rng: Random) -> Changes:
        slot = rng.choice(self._slots)
        return {slot: self._moved(state, slot, rng)}

    def _some_changed(self, state: State, rng: Random) -> Changes:
        """Two or three slots, each elsewhere or otherwise."""
        some = rng.sample(self._slots, min(rng.choice((2, 2, 3)), len(self._slots)))
        return {
            slot: self._moved(state, slot, rng) if rng.random() < 0.5 else self._reformed(state[slot], rng)
            for slot in some
        }

    def _cut_moved(self, state: State, rng: Random) -> Changes:
        """All meshes that begin or end at one device begin or end at another near it: what one slot gains, its
        neighbour loses."""
        ends = {place.slot: _ends(place) for place in state}
        cuts = sorted({cut for pair in ends.values() for cut in pair} - {0, self._devices})
        if not cuts:
            return {}
        cut = rng.choice(cuts)
        slots = [slot for slot, pair in ends.items() if cut in pair]

        def moved(slot: int, to: int) -> tuple[int, int]:
            first, end = ends[slot]
            return (to, end) if first == cut else (first, to)

        legal = [to for to in self._cuts if to != cut and all(moved(slot, to) in self._by_ends for slot in slots)]
        near = sorted(legal, key=lambda to: abs(to - cut))[:NEAR_CUTS]
        if not near:
            return {}
        to = rng.choice(near)
        return {slot: self._resized(state[slot], *moved(slot, to)) for slot in slots}

    def _parted(self, state: State, rng: Random) -> Changes:
        """Two roles, or slots, side by side on the devices that they have between them: most often where the plan is
        worth most by its estimate, as at all other cuts one of the two waits for the other."""
        some = self._roles if rng.random() < 0.5 else [(slot,) for slot in self._slots]
        if len(some) < 2:
            return {}
        one, other = rng.sample(some, 2)
        ends = [_ends(state[slot]) for slot in (*one, *other)]
        first, end = min(first for first, _ in ends), max(end for _, end in ends)
        legal = [cut for cut in self._cuts if (first, cut) in self._by_ends and (cut, end) in self._by_ends]
        if not legal:
            return {}

        def at(cut: int) -> Changes:
            left = {slot: self._resized(state[slot], first, cut) for slot in one}
            return left | {slot: self._resized(state[slot], cut, end) for slot in other}

        parted = [at(cut) for cut in legal]
        parted.sort(key=lambda places: self._estimate(self._changed(state, places)))
        return parted[_passed_over(rng) % len(parted)]

    def _resized(self, place: Place, first: int, end: int) -> Place | None:
        """The slot of a place from one rank to another, cut as it is if it can be, else as fast as it can be there.
        None where it cannot be."""
        ranks, sizes = self._by_ends.get((first, end)), place.layouts[0].parallelism
        if ranks is None or ranks not in self._known[place.slot]:
            return None
        forms = self.space.forms.of(place.slot, ranks)
        alike = (form for form in forms if (form.parallelism.tp, form.parallelism.pp) == (sizes.tp, sizes.pp))
        return self.space.place(place.slot, ranks, next(alike, forms[0]), _after(place))

    def _fused(self, state: State, rng: Random) -> Changes:
        """Two roles train together, on the devices of one that is cut into stages."""
        slot, other = rng.sample(rng.choice(self._pairs), 2)
        p = state[slot].placements[0]
        parts = [pp for pp in range(2, p.pp + 1) if p.pp % pp == 0]
        places = self.space.together(state[slot], other, rng.choice(parts)) if parts else None
        return {} if places is None else {place.slot: place for place in places}

    def _changed(self, state: State, places: Changes) -> State:
        changed = tuple(places.get(slot) or place for slot, place in enumerate(state))
        if all(one is other for one, other in zip(changed, state, strict=True)):
            return state
        return self.space.lawful(changed)

    def _reformed(self, place: Place, rng: Random) -> Place | None:
        """The same devices, used otherwise."""
        return self._on(place.slot, place.placements[0].ranks, rng, _after(place), other=place)

    def _role_reformed(self, state: State, rng: Random) -> Changes:
        """All slots of a role that are on the same devices, used otherwise and alike: equal layouts share weights."""
        slot = rng.choice(self._slots)
        beside = [other for other in self._role_of[slot] if _ends(state[other]) == _ends(state[slot])]
        return self._alike(state, self._reformed(state[slot], rng), beside)

    def _alike(self, state: State, place: Place | None, slots: Sequence[int]) -> Changes:
        """A place, and further slots of its role on its devices in its layout, those of them that can be."""
        if place is None:
            return {}
        ranks, sizes = place.placements[0].ranks, place.layouts[0].parallelism
        others: Changes = {slot: self._in_layout(state[slot], ranks, sizes) for slot in slots if slot != place.slot}
        return {**{slot: other for slot, other in others.items() if other is not None}, place.slot: place}

    def _in_layout(self, place: Place, ranks: tuple[int, ...], sizes: Parallelism) -> Place | None:
        """The slot of a place in this layout. None where it cannot be."""
        forms = (form for form in self.space.forms.of(place.slot, ranks) if form.parallelism == sizes)
        form = next(forms, None)
        return None if form is None else self.space.place(place.slot, ranks, form, _after(place))

    def _moved(self, state: State, slot: int, rng: Random) -> Place | None:
        """Other devices: such as begin and end where others do, near ones, or any."""
        return self._on(slot, self._other_ranks(state, slot, rng), rng, _after(state[slot]))

    def _other_ranks(self, state: State, slot: int, rng: Random) -> tuple[int, ...]:
        mine, now = self._meshes[slot], state[slot].placements[0].ranks
        draw = rng.random()
        if draw < 0.40:
            cuts = {0, self._devices}
            cuts.update(*map(_ends, state))
            some = [ranks for ranks in self._between(sorted(cuts)) if ranks in self._known[slot] and ranks != now]
        elif draw < 0.80:
            some = self._near_of(slot, now)
        else:
            some = mine
        return rng.choice(some or mine)

    def _near_of(self, slot: int, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Neighbours of a mesh on which a slot can be."""
        key = (slot, min(ranks), len(ranks))
        if key not in self._nearby:
            near = self.space.neighbours(ranks)
            self._nearby[key] = [other for other in near if other in self._known[slot]]
        return self._nearby[key]

    def _like_another(self, state: State, rng: Random) -> Changes:
        """A slot on the devices of another; where it is of the same role, in the same layout if that can be."""
        if len(state) < 2:
            return {}
        slot, other = rng.sample(self._slots, 2)
        source = state[other]
        ranks, sizes = source.placements[0].ranks, source.layouts[0].parallelism
        if other in self._role_of[slot] and rng.random() < 0.7:
            place = self._in_layout(state[slot], ranks, sizes)
            if place is not None:
                return {slot: place}
        return {slot: self._on(slot, ranks, rng, _after(state[slot]))}

    def _role_moved(self, state: State, rng: Random) -> Changes:
        """All slots of a role on one mesh, perhaps another's, and perhaps in one layout."""
        slots = rng.choice(self._roles)
        first = rng.choice(slots)
        if rng.random() < 0.5:
            ranks = rng.choice(state).placements[0].ranks
        else:
            ranks = self._other_ranks(state, first, rng)
        places = {slot: self._on(slot, ranks, rng, _after(state[slot])) for slot in slots}
        return places | (self._alike(state, places[first], slots) if rng.random() < 0.7 else {})

    def _exchanged(self, state: State, rng: Random) -> Changes:
        """Two slots, or all that are on their devices, change places."""
        if len(state) < 2:
            return {}
        one, other = (state[slot].placements[0].ranks for slot in rng.sample(self._slots, 2))
        swap = {one: other, other: one}
        return {
            slot: self._on(slot, swap[ranks], rng, _after(state[slot]))
            for slot, place in enumerate(state)
            if (ranks := place.placements[0].ranks) in swap
        }

    def _afters_changed(self, state: State, rng: Random) -> Changes:
        """Another word for what becomes of the memory of a slot, of a role, or of all."""
        draw = rng.random()
        slots: Sequence[int] = self._slots
        if draw < 0.6:
            slots = (rng.choice(self._slots),)
        elif draw < 0.9:
            slots = rng.choice(self._roles)
        word: After = rng.choice(("keep", "offload", "offload", "drop"))
        return {slot: self.space.with_after(state[slot], word) for slot in slots if word in self.space.afters(slot)}

    def _on(
        self, slot: int, ranks: tuple[int, ...], rng: Random, after: After, *, other: Place | None = None
    ) -> Place | None:
        """A slot on these devices: the fastest forms are drawn most often. None where it cannot be."""
        forms: Sequence[Form] = self.space.forms.of(slot, ranks)
        if not forms:
            return None
        if rng.random() < ANOTHER_WORD:
            after = rng.choice(self.space.afters(slot))
        number = 0
        if other is not None or rng.random() < 0.5:
            number = _passed_over(rng)
            if rng.random() < 0.15:
                number = rng.randrange(len(forms))
        return self.space.place(slot, ranks, forms[number % len(forms)], after)


def _passed_over(rng: Random) -> int:
    """How many are passed over before one is taken."""
    number = 0
    while rng.random() < NEAR_THE_FASTEST:
        number += 1
    return number


def _after(place: Place) -> After:
    return place.placements[0].after


def _ends(place: Place) -> tuple[int, int]:
    """The first rank, and the one behind the last."""
    return (place.mask & -place.mask).bit_length() - 1, place.mask.bit_length()

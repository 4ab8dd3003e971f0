"""Plans near a plan: one call elsewhere or otherwise, two calls, a role moved or cut as one, devices exchanged or
split anew, memory kept or let go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random

from plait.planner.plan_space import PlanSpace
from plait.planner.slot_places import SlotPlaces, after_of, ends_of, passed_over, ranks_of
from plait.schedule.plan import After, Mode
from plait.simulator.places import Place

State = tuple[Place, ...]
Changes = dict[int, Place | None]
"""Slot → where it is from now on; None: where it was."""

NEAR_CUTS = 6
"""Devices to which a cut may move."""


class Moves:
    """Random changes of plans within a space. All that is drawn is drawn from the caller's generator."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.graph = space.graph
        self._slots = range(len(self.graph.slots))
        self._at = SlotPlaces(space)
        self._meshes, self._by_ends = self._at.meshes, space.by_ends
        self._best_cuts: dict[tuple[tuple[int, ...], tuple[int, ...], int, int], list[int]] = {}
        """What `_cuts_between` has answered."""
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
            places.append(self.space.fastest(slot, ranks))
        return self.space.lawful(places)

    def random(self, rng: Random) -> State | None:
        """A plan drawn at random: the devices cut in a few parts, and each role on one of them or on all."""
        if not all(self._meshes):
            return None
        cuts = sorted({0, self._devices, *(rng.choice(self._cuts) for _ in range(rng.choice((0, 1, 1, 2, 3))))})
        parts = [ranks for ranks in self._at.between(cuts) if len(ranks) < self._devices or len(cuts) == 2]
        together = rng.random()
        places: list[Place] = []
        for slot, slot_of_role in enumerate(self.graph.slots):
            same = next((p for p in places if self.graph.slots[p.slot].role == slot_of_role.role), None)
            ranks = ranks_of(same) if same is not None and rng.random() < together else None
            if ranks is None or ranks not in self._at.known[slot]:
                mine = [mesh for mesh in parts if mesh in self._at.known[slot]] or self._meshes[slot]
                ranks = rng.choice(mine)
            place = self._at.on(slot, ranks, rng, "keep")
            assert place is not None, "a mesh that a slot can be on has a form"
            places.append(place)
        return self.space.lawful(sorted(places, key=lambda place: place.slot))

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
        ends = {place.slot: ends_of(place) for place in state}
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
        return {slot: self._at.resized(state[slot], *moved(slot, to)) for slot in slots}

    def _parted(self, state: State, rng: Random) -> Changes:
        """Two roles, or slots, side by side on the devices that they have between them, perhaps each role in one
        layout."""
        some = self._roles if rng.random() < 0.5 else [(slot,) for slot in self._slots]
        if len(some) < 2:
            return {}
        one, other = rng.sample(some, 2)
        ends = [ends_of(state[slot]) for slot in (*one, *other)]
        first, end = min(first for first, _ in ends), max(end for _, end in ends)
        cuts = self._cuts_between(one, other, first, end)
        if not cuts:
            return {}
        cut = cuts[passed_over(rng) % len(cuts)]
        places: Changes = {slot: self._at.resized(state[slot], first, cut) for slot in one}
        places |= {slot: self._at.resized(state[slot], cut, end) for slot in other}
        if rng.random() < 0.5:
            for slots in (one, other):
                places |= self._alike(state, places[rng.choice(slots)], slots)
        return places

    def _cuts_between(self, one: tuple[int, ...], other: tuple[int, ...], first: int, end: int) -> list[int]:
        """Where slots may be split, the best first: by the seconds of all, each as fast as it can be on its side, of a
        mode those of the side that takes longer."""
        key = (one, other, first, end)
        if key not in self._best_cuts:
            legal = [cut for cut in self._cuts if (first, cut) in self._by_ends and (cut, end) in self._by_ends]
            seconds = {cut: self._side_by_side_s((one, first, cut), (other, cut, end)) for cut in legal}
            self._best_cuts[key] = sorted(legal, key=seconds.__getitem__)
        return self._best_cuts[key]

    def _side_by_side_s(self, *sides: tuple[tuple[int, ...], int, int]) -> float:
        """What `_cuts_between` makes small.

        Args:
            sides: slots, the first of their ranks, and the one behind the last.
        """
        by_mode: dict[Mode, list[float]] = defaultdict(lambda: [0.0] * len(sides))
        for side, (slots, first, end) in enumerate(sides):
            for slot in slots:
                by_mode[self.graph.slots[slot].mode][side] += self._at.least_s(slot, first, end)
        return sum(map(max, by_mode.values()))

    def _fused(self, state: State, rng: Random) -> Changes:
        """Two roles train together, on the devices of one that is cut into stages."""
        slot, other = rng.sample(rng.choice(self._pairs), 2)
        p = state[slot].placements[0]
        fewest = p.pp if self.space.problem.roles[self.graph.slots[other].role].one_copy else 2
        parts = [pp for pp in range(max(2, fewest), p.pp + 1) if p.pp % pp == 0]
        places = self.space.together(state[slot], other, rng.choice(parts)) if parts else None
        return {} if places is None else {place.slot: place for place in places}

    def _changed(self, state: State, places: Changes) -> State:
        changed = tuple(places.get(slot) or place for slot, place in enumerate(state))
        if all(one is other for one, other in zip(changed, state, strict=True)):
            return state
        return self.space.lawful(changed)

    def _reformed(self, place: Place, rng: Random) -> Place | None:
        """The same devices, used otherwise."""
        return self._at.on(place.slot, ranks_of(place), rng, after_of(place), otherwise=True)

    def _role_reformed(self, state: State, rng: Random) -> Changes:
        """All slots of a role that are on the same devices, used otherwise and alike: equal layouts share weights."""
        slot = rng.choice(self._slots)
        beside = [other for other in self._role_of[slot] if ends_of(state[other]) == ends_of(state[slot])]
        return self._alike(state, self._reformed(state[slot], rng), beside)

    def _alike(self, state: State, place: Place | None, slots: Sequence[int]) -> Changes:
        """A place, and further slots of its role on its devices in its layout, those of them that can be; no other has
        prompts to compute on devices of their own."""
        if place is None:
            return {}
        if place.is_apart:
            return {place.slot: place}
        ranks, sizes = place.placements[0].ranks, place.layouts[0].parallelism
        others: Changes = {slot: self._at.in_layout(state[slot], ranks, sizes) for slot in slots if slot != place.slot}
        return {**{slot: other for slot, other in others.items() if other is not None}, place.slot: place}

    def _moved(self, state: State, slot: int, rng: Random) -> Place | None:
        """Other devices: such as begin and end where others do, near ones, or any."""
        return self._at.on(slot, self._other_ranks(state, slot, rng), rng, after_of(state[slot]))

    def _other_ranks(self, state: State, slot: int, rng: Random) -> tuple[int, ...]:
        mine, now = self._meshes[slot], ranks_of(state[slot])
        draw = rng.random()
        if draw < 0.40:
            cuts = {0, self._devices}
            cuts.update(*map(ends_of, state))
            some = [ranks for ranks in self._at.between(sorted(cuts)) if ranks in self._at.known[slot] and ranks != now]
        elif draw < 0.80:
            some = self._at.near_of(slot, now)
        else:
            some = mine
        return rng.choice(some or mine)

    def _like_another(self, state: State, rng: Random) -> Changes:
        """Put a slot on the devices of another slot. If both are of the same role, mostly in the same layout, too,
        where that is possible."""
        if len(state) < 2:
            return {}
        slot, other = rng.sample(self._slots, 2)
        source = state[other]
        ranks, sizes = ranks_of(source), source.layouts[0].parallelism
        if other in self._role_of[slot] and rng.random() < 0.7:
            place = self._at.in_layout(state[slot], ranks, sizes)
            if place is not None:
                return {slot: place}
        return {slot: self._at.on(slot, ranks, rng, after_of(state[slot]))}

    def _role_moved(self, state: State, rng: Random) -> Changes:
        """All slots of a role on one mesh, perhaps another's, and perhaps in one layout."""
        slots = rng.choice(self._roles)
        first = rng.choice(slots)
        if rng.random() < 0.5:
            ranks = ranks_of(rng.choice(state))
        else:
            ranks = self._other_ranks(state, first, rng)
        places = {slot: self._at.on(slot, ranks, rng, after_of(state[slot])) for slot in slots}
        return places | (self._alike(state, places[first], slots) if rng.random() < 0.7 else {})

    def _exchanged(self, state: State, rng: Random) -> Changes:
        """Two slots, or all that are on their devices, change places."""
        if len(state) < 2:
            return {}
        one, other = (ranks_of(state[slot]) for slot in rng.sample(self._slots, 2))
        swap = {one: other, other: one}
        return {
            slot: self._at.on(slot, swap[ranks], rng, after_of(state[slot]))
            for slot, place in enumerate(state)
            if (ranks := ranks_of(place)) in swap
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

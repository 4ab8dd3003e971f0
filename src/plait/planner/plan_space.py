"""Which plans a search may propose: for each slot of a step a mesh, one of its forms there, and what becomes of its
memory. All of them can be followed by a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from plait.errors import DataError
from plait.layout.mesh import Parallelism
from plait.planner.plan_problem import PlanProblem
from plait.planner.slot_divisions import SlotDivisions
from plait.planner.slot_forms import Form, SlotForms
from plait.schedule.completion import sharing
from plait.schedule.fused import FUSED, shared_rows
from plait.schedule.plan import After, Placement
from plait.simulator.places import Place, Places
from plait.simulator.step_weights import careful


class PlanSpace:
    """Meshes and forms of a problem, and places made of them."""

    def __init__(self, problem: PlanProblem) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.places = Places(problem.graph, problem.costs, problem.num_devices)
        cluster = problem.costs.cluster.mesh_cluster
        self.meshes = tuple(mesh.ranks for mesh in cluster.legal_meshes(problem.smallest_mesh))
        self.by_ends = {(ranks[0], ranks[-1] + 1): ranks for ranks in self.meshes}
        """First rank, and the one behind the last → the legal mesh that has all between."""
        self.forms = SlotForms(problem, self.places)
        self.divisions = SlotDivisions(problem, self.places, self.forms, self.by_ends)
        self._whose = {role: self.graph.owners.get(role, role) for role in self.graph.roles}
        self._sharded = frozenset(role for role, facts in problem.roles.items() if facts.shards_weights)
        self._made: dict[tuple[int, tuple[int, ...], Form, After], Place] = {}
        self._have_shared_rows = cache(self._share_rows)

    def neighbours(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Meshes that begin or end where this one does, or are as large and beside it."""
        first, last, size = min(ranks), max(ranks), len(ranks)
        near = []
        for other in self.meshes:
            beside = len(other) == size and (other[0] == last + 1 or other[-1] == first - 1)
            if beside or (other[0] == first) != (other[-1] == last):
                near.append(other)
        return near

    def placement(self, slot: int, ranks: tuple[int, ...], form: Form, after: After = "keep") -> Placement:
        what, sizes = self.graph.slots[slot], form.parallelism
        call = self.graph.calls[self.graph.calls_of[slot][0]].call
        return Placement(
            call,
            what.mode,
            ranks,
            sizes.dp,
            sizes.tp,
            sizes.pp,
            after,
            sizes.stages,
            form.micro_batch_tokens,
            form.schedule,
            self.problem.shares(slot, sizes),
        )

    def place(self, slot: int, ranks: tuple[int, ...], form: Form, after: After = "keep") -> Place:
        key = (slot, ranks, form, after)
        if key not in self._made:
            self._made[key] = self.places.place(slot, [self.placement(slot, ranks, form, after)], [form.asked])
        return self._made[key]

    def num_ways(self, slot: int, ranks: tuple[int, ...]) -> int:
        """How many `ways` a slot has on a mesh."""
        return len(self.forms.of(slot, ranks)) + len(self.divisions.of(slot, ranks))

    def ways(self, slot: int, ranks: tuple[int, ...], after: After = "keep") -> list[Place]:
        """All places of a slot on a mesh: its forms, then those whose prompts have devices of their own."""
        places = [self.place(slot, ranks, form, after) for form in self.forms.of(slot, ranks)]
        return places + [self.divisions.place(slot, ranks, one, after) for one in self.divisions.of(slot, ranks)]

    def fastest(self, slot: int, ranks: tuple[int, ...]) -> Place:
        """A slot as fast as it can be by itself on a mesh that has forms of it."""
        if divisions := self.divisions.of(slot, ranks):
            return self.divisions.place(slot, ranks, divisions[0])
        return self.place(slot, ranks, self.forms.of(slot, ranks)[0])

    def with_after(self, place: Place, after: After) -> Place:
        """The same place, where something else becomes of its memory."""
        return self.places.place(place.slot, [replace(p, after=after) for p in place.placements], place.asked)

    def afters(self, slot: int) -> tuple[After, ...]:
        """That a slot may have, whatever else is chosen."""
        what = self.graph.slots[slot]
        home = self.graph.home_of(what.role) == slot
        drops = self.problem.roles[what.role].may_drop and not home and what.role in self.graph.trained
        return ("keep", "offload", "drop") if drops else ("keep", "offload")

    def lawful(self, places: Sequence[Place]) -> tuple[Place, ...]:
        """What is the role's own weights cannot be dropped: it is offloaded. What scores where a training shares
        weights takes these (`schedule.completion.sharing`)."""
        changed = list(places)
        for slot, place in enumerate(places):
            if any(p.after == "drop" for p in place.placements):
                home = places[self.graph.home_of(self.graph.slots[slot].role)]
                own = [p.after == "drop" and _has_no_other(p, place, home) for p in place.placements]
                if any(own):
                    placements = [
                        replace(p, after="offload") if is_own else p
                        for p, is_own in zip(place.placements, own, strict=True)
                    ]
                    changed[slot] = self.places.place(slot, placements, place.asked)
        self._part_unlike(changed)
        return tuple(self._with_shares(changed))

    def _with_shares(self, places: list[Place]) -> list[Place]:
        if not self._sharded:
            return places
        placements = [p for place in places for p in place.placements]
        shares = iter(sharing(placements, self._whose, self._sharded))
        changed = []
        for place in places:
            mine = [replace(p, shards_weights=next(shares)) for p in place.placements]
            changed.append(place if mine == [*place.placements] else self.places.place(place.slot, mine))
        return changed

    def plain(self, places: Sequence[Place]) -> tuple[Place, ...]:
        """The same plan without words that change nothing: weights stay that another call keeps on all of the ranks."""
        changed = list(places)
        for family in self.graph.families:
            mine = [places[slot] for slot in family]
            for place, after in zip(mine, careful(mine), strict=True):
                if place.state is None and place.leaves and not after[place.parts >= 0].any():
                    changed[place.slot] = self.with_after(place, "keep")
        return tuple(changed)

    def _part_unlike(self, places: list[Place]) -> None:
        """Roles that train together have the same rows, those of `one_copy` once, or train one after the other."""
        fused = fused_slots(places)
        if fused and not self._have_shared_rows(*(places[slot] for slot in fused)):
            places[:] = self.apart(places)

    def _share_rows(self, *fused: Place) -> bool:
        placements = {self.graph.slots[place.slot].role: place.placements[0] for place in fused}
        try:
            copies = Counter(role for role, _ in shared_rows(placements))
        except DataError:
            return False
        return all(count == 1 or not self.problem.roles[role].one_copy for role, count in copies.items())

    def apart(self, places: Sequence[Place]) -> tuple[Place, ...]:
        """The same plan, where roles that train together train one after the other."""
        changed, cluster = list(places), self.problem.costs.cluster
        for slot in fused_slots(places):
            p = places[slot].placements[0]
            ranks, stages = tuple(sorted(p.ranks)), p.stages
            if cluster.kinds_of(ranks) != cluster.kinds_of(p.ranks):  # its stages are on other devices than before
                sizes = self._sizes_of(slot, ranks, p.dp, p.tp, p.pp)
                stages = stages if sizes is None else sizes.stages
            changed[slot] = self.places.place(slot, [replace(p, ranks=ranks, stages=stages, schedule="")])
        return tuple(changed)

    def _sizes_of(self, slot: int, ranks: tuple[int, ...], dp: int, tp: int, pp: int) -> Parallelism | None:
        """The first parallelism of these sizes that a run can follow, its stages cut for the ranks in their order."""
        allowed = self.forms.parallelisms(slot, ranks)
        return next((sizes for sizes in allowed if (sizes.dp, sizes.tp, sizes.pp) == (dp, tp, pp)), None)

    def together(self, place: Place, slot: int, pp: int) -> tuple[Place, Place] | None:
        """A training that is cut into stages, and that of another role on the same devices, its stages the other way.

        Args:
            slot: of the other; pp: its stages, which divide those of the first.
        """
        p = place.placements[0]
        layout = p.layout
        ranks = tuple(
            layout.rank_at(dp, tp, pp * copy + pp - 1 - stage)
            for dp, copy, stage, tp in product(range(p.dp), range(p.pp // pp), range(pp), range(p.tp))
        )
        sizes = self._sizes_of(slot, ranks, p.dp * p.pp // pp, p.tp, pp)
        if sizes is None:
            return None
        form = self.forms.form_of(slot, ranks, sizes, FUSED)
        first = self.places.place(place.slot, [replace(p, schedule=FUSED)])
        return first, self.place(slot, ranks, form)


def _has_no_other(p: Placement, place: Place, home: Place) -> bool:
    """Whether all parts that a placement of a place has are the role's own weights."""
    ranks = list(p.ranks)
    return home is place or bool((place.parts[ranks] == home.parts[ranks]).all())


def fused_slots(places: Sequence[Place]) -> list[int]:
    """Trainings that go on together with another role's."""
    return [slot for slot, place in enumerate(places) if place.placements[0].schedule == FUSED]

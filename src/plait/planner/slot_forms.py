"""How each slot of a step may be computed on a mesh: parallelisms, layers of stages, micro-batches and pipeline
schedules that have room, and that no other beats in seconds and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from plait.layout.mesh import Layout, Mesh, Parallelism
from plait.layout.shards import stage_bounds
from plait.planner.plan_problem import MOST_STAGES, PlanProblem, StageWork
from plait.planner.stage_layers import StageDevices, cut_layers
from plait.schedule.plan import Placement
from plait.simulator.places import PlacementCosts, Places, most_of_calls

LARGE = 16
"""Devices beyond which micro-batches and schedules that take less memory are for those alone that have no room else."""


@dataclass(frozen=True, eq=False)
class Form:
    """How a slot is computed on meshes of one shape.

    seconds:      of its calls
    static_bytes: weights and state of the fullest stage
    active_bytes: what its calls take beside
    fullest:      both, of the stage that they leave least room; where the mesh has devices of several kinds, as shares
                  of each stage's room
    """

    parallelism: Parallelism
    micro_batch_tokens: int | None
    schedule: str
    asked: PlacementCosts
    seconds: float
    static_bytes: float
    active_bytes: float
    fullest: tuple[float, float]

    @property
    def key(self) -> tuple[float, float, float]:
        return self.seconds, self.static_bytes, self.active_bytes


class SlotForms:
    """Forms of the slots of a problem, made when they are first asked for.

    Args:
        places: say what a placement asks for.
    """

    def __init__(self, problem: PlanProblem, places: Places) -> None:
        self._problem, self._places = problem, places
        self._graph = problem.graph
        self._shapes: dict[tuple[int, ...], object] = {}
        self._all: dict[tuple[int, object], tuple[Form, ...]] = {}
        self._forms: dict[tuple[int, object], tuple[Form, ...]] = {}
        self._made: dict[tuple[int, object, Parallelism, int | None, str], Form] = {}
        self._stages: dict[tuple[tuple[float, ...], float, float, int, StageWork], tuple[int, ...]] = {}

    def of(self, slot: int, ranks: tuple[int, ...]) -> tuple[Form, ...]:
        """Those of a slot on a mesh that no other beats in seconds and memory, and those that other calls of the role
        have there, as equal layouts share their weights; the fastest first. None: none of them has room."""
        key = (slot, self.shape(ranks))
        if key not in self._forms:
            role = self._graph.slots[slot].role
            mine = self._graph.slots_of(role).values()
            wanted = {form.parallelism for other in mine for form in undominated(self._every(other, ranks))}
            kept = dict.fromkeys(undominated(self._every(slot, ranks)))
            wanted -= {form.parallelism for form in kept}
            for form in self._every(slot, ranks):
                if form.parallelism in wanted:
                    kept[form] = None
                    wanted.remove(form.parallelism)
            self._forms[key] = tuple(sorted(kept, key=lambda form: form.key))
        return self._forms[key]

    def shape(self, ranks: tuple[int, ...]) -> object:
        """Equal for meshes on which everything takes as long: which of their ranks share a node, and of which kind."""
        if ranks not in self._shapes:
            cluster, nodes = self._problem.costs.cluster, dict[int, int]()
            per_node = cluster.mesh_cluster.devices
            together = tuple(nodes.setdefault(rank // per_node, len(nodes)) for rank in ranks)
            self._shapes[ranks] = together, cluster.kinds_of(ranks)
        return self._shapes[ranks]

    def _every(self, slot: int, ranks: tuple[int, ...]) -> tuple[Form, ...]:
        """All forms that have room by themselves, by their seconds."""
        key = (slot, self.shape(ranks))
        if key not in self._all:
            forms = []
            for sizes in self.parallelisms(slot, ranks):
                forms += self._tried(slot, ranks, sizes)
            self._all[key] = tuple(sorted(forms, key=lambda form: form.key))
        return self._all[key]

    def parallelisms(self, slot: int, ranks: tuple[int, ...]) -> list[Parallelism]:
        """That a run can follow on so many devices, stages cut so that they take equally long; on devices of several
        kinds, and of unlike layers, in each call of the role, as equal layouts share weights."""
        cluster = self._problem.costs.cluster.mesh_cluster
        facts, mode = self._problem.roles[self._graph.slots[slot].role], self._graph.slots[slot].mode
        most_tp = min(facts.max_tp, cluster.devices)
        sizes_of_all = []
        for sizes in Parallelism.all_of(len(ranks)):
            whole = (facts.whole_layers and mode == "decode") or (facts.trains_whole and mode == "train")
            if whole and sizes.tp > 1:
                continue
            if sizes.tp > most_tp or sizes.pp > min(len(facts.layer_work), MOST_STAGES):
                continue
            if not cluster.is_legal_size(sizes.tp):
                continue
            works = self._works_of(slot, ranks, sizes)
            cuts = dict.fromkeys(self._cut(slot, sizes.pp, work) for work in works)
            sizes_of_all += [replace(sizes, stages=cut) for cut in cuts]
        return sizes_of_all

    def _cut(self, slot: int, pp: int, work: StageWork) -> tuple[int, ...]:
        if pp == 1:
            return ()
        role = self._graph.slots[slot].role
        facts = self._problem.roles[role]
        key = (facts.layer_work, facts.first, facts.last, pp, work)
        if key not in self._stages:
            cut = cut_layers(
                facts.layer_work,
                pp,
                first_s=facts.first,
                last_s=facts.last,
                devices=[StageDevices(speed=speed, layer_s=layers) for speed, layers in work],
            )
            assert cut is not None, f"{role}: {pp} stages of {len(facts.layer_work)} layers"
            self._stages[key] = cut
        return self._stages[key]

    def _works_of(self, slot: int, ranks: tuple[int, ...], sizes: Parallelism) -> tuple[StageWork, ...]:
        """What the layers of a parallelism take, in each call of the slot's role, its own first; an empty one where all
        layers are alike, and all stages on devices alike."""
        graph, role = self._graph, self._graph.slots[slot].role
        if sizes.pp == 1 or not (self._is_mixed(ranks) or self._problem.roles[role].layer_sizes):
            return ((),)
        layout, others = Layout(Mesh(ranks), sizes), graph.slots_of(role).values()
        works = []
        for of_role in dict.fromkeys((slot, *others)):
            call = graph.calls[graph.calls_of[of_role][0]].call
            works.append(self._problem.stage_works(call, graph.slots[of_role].mode, layout))
        return tuple(dict.fromkeys(works))

    def _tried(self, slot: int, ranks: tuple[int, ...], sizes: Parallelism) -> list[Form]:
        """Forms of one parallelism, with the micro-batches and schedules that are not beaten; with its layers cut so
        that they have room, where for equal work they have not.
        """
        forms = self._fitting(slot, ranks, sizes)
        if not forms and sizes.pp > 1:
            cut = self._cut_for_room(slot, ranks, sizes)
            if cut is not None and cut != sizes.stages:
                forms = self._fitting(slot, ranks, replace(sizes, stages=cut))
        return undominated(forms)

    def _fitting(self, slot: int, ranks: tuple[int, ...], sizes: Parallelism) -> list[Form]:
        mode = self._graph.slots[slot].mode
        tokens: tuple[int | None, ...] = (None,)
        if mode in ("train", "score"):
            tokens += self._problem.micro_batch_tokens
        schedules = ("", "one at a time") if mode == "train" and sizes.pp > 1 else ("",)
        forms: list[Form] = []
        for schedule in schedules:
            for most_tokens in tokens:
                if forms and self._problem.num_devices > LARGE:
                    return forms  # the fastest has room
                if self._fits(slot, ranks, sizes, most_tokens, schedule):
                    forms.append(self._form(slot, ranks, sizes, most_tokens, schedule))
        return forms

    def _fits(self, slot: int, ranks: tuple[int, ...], sizes: Parallelism, tokens: int | None, schedule: str) -> bool:
        """Whether a form has room by itself, or with what a training there has: known without its price, which takes
        longer."""
        ways = dict.fromkeys((self._problem.shares(slot, sizes), self._problem.may_share(slot, sizes)))
        layouts = [Layout(Mesh(ranks), sizes, shares) for shares in ways]
        return any(self._have_room(*self._needed(slot, one, tokens, schedule), one) for one in layouts)

    def _needed(
        self, slot: int, layout: Layout, tokens: int | None = None, schedule: str = ""
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Bytes of each stage: of weights and state, and of what the calls of a slot take beside."""
        what, costs, graph = self._graph.slots[slot], self._problem.costs, self._graph
        held_bytes = costs.held_bytes(what.role, layout, trained=what.mode == "train")
        of_calls = [
            costs.working_bytes(
                graph.calls[number].call, what.mode, layout, micro_batch_tokens=tokens, schedule=schedule
            )
            for number in graph.calls_of[slot]
        ]
        return held_bytes, most_of_calls(of_calls, layout.parallelism.pp)

    def _form(self, slot: int, ranks: tuple[int, ...], sizes: Parallelism, tokens: int | None, schedule: str) -> Form:
        key = (slot, self.shape(ranks), sizes, tokens, schedule)
        if key not in self._made:
            self._made[key] = self._made_on(slot, ranks, sizes, tokens, schedule)
        return self._made[key]

    def _made_on(
        self, slot: int, ranks: tuple[int, ...], sizes: Parallelism, tokens: int | None, schedule: str
    ) -> Form:
        what = self._graph.slots[slot]
        call = self._graph.calls[self._graph.calls_of[slot][0]].call
        how = sizes.dp, sizes.tp, sizes.pp, "keep", sizes.stages, tokens, schedule, self._problem.shares(slot, sizes)
        asked = self._places.ask(slot, Placement(call, what.mode, ranks, *how))
        held_bytes, working = _needed(asked, sizes.pp)
        seconds, static, active = sum(cost.seconds for cost in asked.calls), max(held_bytes), max(working)
        fullest = float(static), float(active)
        if self._is_mixed(ranks):
            rooms = self._rooms(ranks, sizes)
            fullest = _largest_share(held_bytes, rooms), _largest_share(working, rooms)
        return Form(sizes, tokens, schedule, asked, seconds, float(static), float(active), fullest)

    def has_room(self, asked: PlacementCosts, layout: Layout) -> bool:
        """Whether what a placement asks for fits by itself."""
        return self._have_room(*_needed(asked, layout.parallelism.pp), layout)

    def _have_room(self, held_bytes: Sequence[int], working: Sequence[int], layout: Layout) -> bool:
        needed = map(sum, zip(held_bytes, working, strict=True))
        rooms = self._rooms(layout.mesh.ranks, layout.parallelism)
        return all(most <= room for most, room in zip(needed, rooms, strict=True))

    def _is_mixed(self, ranks: tuple[int, ...]) -> bool:
        """Whether a mesh has devices of several kinds."""
        return len(set(self._problem.costs.cluster.kinds_of(ranks))) > 1

    def _rooms(self, ranks: tuple[int, ...], sizes: Parallelism) -> list[int]:
        """Bytes beside the process itself, of the smallest device of each stage."""
        costs = self._problem.costs
        cluster, process = costs.cluster, sum(costs.process_terms.values())
        if not self._is_mixed(ranks):
            return [cluster.memory_of(ranks[0]) - process] * sizes.pp
        stages = np.arange(len(ranks)) // sizes.tp % sizes.pp
        memory = np.array([cluster.memory_of(rank) for rank in ranks])
        return [int(memory[stages == stage].min()) - process for stage in range(sizes.pp)]

    def form_of(self, slot: int, ranks: tuple[int, ...], sizes: Parallelism, schedule: str = "") -> Form:
        """The form of a slot in a given parallelism and schedule, whether it has room or not."""
        return self._form(slot, ranks, sizes, None, schedule)

    def smallest(self, slot: int, ranks: tuple[int, ...]) -> Form:
        """That which takes least of its fullest device, whether it has room or not."""
        forms = [self.form_of(slot, ranks, sizes) for sizes in self.parallelisms(slot, ranks)]
        return min(forms, key=lambda form: (sum(form.fullest), form.key))

    def _cut_for_room(self, slot: int, ranks: tuple[int, ...], sizes: Parallelism) -> tuple[int, ...] | None:
        """Layers of each stage by what its devices have room for: each as much for its weights as in the cut for equal
        work."""
        facts = self._problem.roles[self._graph.slots[slot].role]
        layout = Layout(Mesh(ranks), sizes, self._problem.shares(slot, sizes))
        held_bytes, working = self._needed(slot, layout)
        layer_sizes = facts.layer_sizes or (1.0,) * len(facts.layer_work)
        bounds = stage_bounds(len(layer_sizes), sizes)
        stage_sizes = [sum(layer_sizes[start:stop]) for start, stop in pairwise(bounds)]
        layer = min(num_bytes / layers for num_bytes, layers in zip(held_bytes, stage_sizes, strict=True))
        rooms = [
            room - (num_bytes - layer * layers) - active
            for room, num_bytes, layers, active in zip(
                self._rooms(ranks, sizes), held_bytes, stage_sizes, working, strict=True
            )
        ]
        work = self._works_of(slot, ranks, sizes)[0] or ((1.0, ()),) * sizes.pp
        return cut_layers(
            facts.layer_work,
            sizes.pp,
            first_s=facts.first,
            last_s=facts.last,
            layer_bytes=[layer * size for size in layer_sizes],
            devices=[StageDevices(room, *stage) for room, stage in zip(rooms, work, strict=True)],
        )


def _needed(asked: PlacementCosts, stages: int) -> tuple[Sequence[int], Sequence[int]]:
    """As `SlotForms._needed`, where it is known what a placement asks for."""
    held_bytes = [weights + state for weights, state in zip(asked.held, asked.state, strict=True)]
    return held_bytes, most_of_calls([cost.working_bytes for cost in asked.calls], stages)


def _largest_share(needed_bytes: Sequence[float], rooms: Sequence[int]) -> float:
    """What is needed on a stage, of its room; of the stage where that is most. Infinite where one has no room."""
    return max(needed / room if room > 0 else math.inf for needed, room in zip(needed_bytes, rooms, strict=True))


def undominated(forms: Sequence[Form]) -> list[Form]:
    """Without those that another equals or beats in everything; the fastest first."""
    kept: list[Form] = []
    for form in sorted(forms, key=lambda candidate: (candidate.seconds, *candidate.fullest)):
        static, active = form.fullest
        if not any(better.fullest[0] <= static and better.fullest[1] <= active for better in kept):
            kept.append(form)
    return kept

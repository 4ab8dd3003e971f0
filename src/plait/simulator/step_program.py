"""The calls of simulated steps as a dispatcher's program, with moves of weights, offloads and loads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from plait.cost.costs import CallCost
from plait.schedule.dispatch import Key, Task
from plait.schedule.work import Done, Work, nothing
from plait.simulator.atoms import atoms_of
from plait.simulator.clock import SimulatedClock
from plait.simulator.joint_orders import taken_together_s
from plait.simulator.places import Place
from plait.simulator.step_graph import NO_MODEL, StepGraph
from plait.simulator.step_order import StepOrder
from plait.simulator.step_weights import Copies, Unit, Weights
from plait.simulator.tails import Spare, spare_of

KIND = {"decode": "DECODE", "prefill": "PREFILL", "score": "SCORE", "train": "TRAIN"}
MOVE, LOAD, LEAVE, FUNCTIONS = "MOVE", "ONLOAD", "OFFLOAD", "FUNCTIONS"
_DONE = {kind: Done(kind, kind) for kind in (*KIND.values(), MOVE, LOAD, LEAVE, FUNCTIONS)}


class Action(NamedTuple):
    """What was done on all ranks of a mask. A call that scores parts during generation has its seconds in one piece,
    before its end. `call` is the number of the call that it was done for; the number of calls, at the end of a step."""

    name: str
    kind: str
    role: str
    mask: int
    start_s: float
    end_s: float
    step: int
    call: int
    bytes: int = 0


class _Streaming(NamedTuple):
    """A call that scores samples as they end, on other ranks than they are generated on.

    mesh: what its task keeps busy once the generation has ended; mask: its ranks; seconds: of its scores
    """

    task: Task
    mesh: frozenset[int]
    mask: int
    seconds: float


@dataclass(eq=False)
class StepProgram:
    """`schedule.dispatch.Program`: the calls of a step, by (step, place in the graph), and after them its end."""

    graph: StepGraph
    places: Sequence[Place]
    weights: Sequence[Weights]
    clock: SimulatedClock
    functions_s: Mapping[str, float]
    """Call that reward functions answer → its seconds."""
    orders: Mapping[str, float] = field(default_factory=dict)
    """See `joint_orders.shares_of`."""
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.units = [unit for of_family in self.weights for unit in of_family.units]
        self.copies = [copies for of_family in self.weights for copies in of_family.copies]
        self._brought = frozenset(slot for copies in self.copies for slot in copies.slots)
        """Slots to which weights are moved first: their scores begin when generation has ended."""
        self._there = dict.fromkeys(self.units, 0)
        self._stale: set[Copies] = set(self.copies)
        self._generated: dict[int, tuple[float, float, float]] = {}
        """Generation of this step → (its start, when its first prompts have all their samples, its end)."""
        self._streaming: dict[int, list[_Streaming]] = {}
        """Generation of this step → the calls that score during it."""
        self._spare: dict[int, Spare] = {}
        """Score of this step on ranks that generate its samples → the time that these are idle before the end."""
        self._meshes = [self._mask(number) for number in range(len(self.graph.calls))]
        self._begins = [self._mask(number, begins=True) for number in range(len(self.graph.calls))]
        self._sources = [*map(self._source, range(len(self.graph.calls))), None]
        """Call → the generation whose samples it may score as they end, on other ranks; None: it waits for all."""
        self._everywhere = 0
        for mask in self._begins:
            self._everywhere |= mask
        self._atoms = atoms_of((*self._meshes, *self._begins))
        self.order = StepOrder(self.graph, self.places, self.copies)
        self._groups = self.order.together()

    def _mask(self, number: int, *, begins: bool = False) -> int:
        """Ranks that a call keeps busy. With `begins` the ranks that send it weights are included."""
        call = self.graph.calls[number]
        mask = 0
        for slot in (call.slot, *call.deciding):
            if slot != NO_MODEL:
                mask |= self.places[slot].mask
                for copies in self.copies:
                    if slot in copies.slots and (begins or copies.drops):
                        mask |= copies.movers
        return mask

    def _source(self, number: int) -> int | None:
        source = self.graph.calls[number].source
        if source is None or self.graph.ahead or self._meshes[number] & self._meshes[source]:
            return None
        return source

    def needs(self, key: Key) -> Collection[Key]:
        step, number = key
        if self.graph.ahead and number < len(self.graph.calls):
            return [(step, call) for call in self.order.needs_ahead(number)]
        waits = self.graph.waits[number][self._sources[number] in self._generated]
        return waits if step == 0 else [(step, call) for _, call in waits]

    def partners(self, key: Key) -> tuple[Key, ...]:
        group = self._groups.get(key[1])
        return (key,) if group is None else tuple((key[0], number) for number in group)

    def mesh(self, key: Key) -> frozenset[int]:
        return self._atoms[self._everywhere if key[1] == len(self.graph.calls) else self._begins[key[1]]]

    def begin(self, keys: tuple[Key, ...]) -> Task:
        step, number = keys[0]
        if number == len(self.graph.calls):
            return Task(keys, "end", self._leaving(step), self.mesh(keys[0]))
        name = " + ".join([self.graph.calls[call].call for _, call in keys])
        task = Task(keys, name, nothing(), frozenset().union(*map(self.mesh, keys)))
        if len(keys) > 1:
            task.work = self._trained_together(step, [call for _, call in keys])
        elif self.graph.calls[number].slot == NO_MODEL:
            task.work = self._functions(step, number)
        else:
            task.work = self._work(step, number, task)
        return task

    def _functions(self, step: int, number: int) -> Work[None]:
        """The work of a call that reward functions answer: each group as soon as its samples have ended."""
        call, now = self.graph.calls[number], self.clock.now_s
        seconds = self.functions_s[call.call]
        end = now + seconds
        if call.source in self._generated:
            end = _streamed(now, seconds, self.graph.rollouts.groups, *self._generated[call.source])
        yield from self._taking(Action(call.call, FUNCTIONS, "", 0, end - seconds, end, step, number))

    def _trained_together(self, step: int, numbers: Sequence[int]) -> Work[None]:
        """Training calls of one schedule, each role of which fills the gaps of the others (`joint_orders`)."""
        slots: dict[int, list[int]] = {}
        for number in numbers:
            slots.setdefault(self.graph.calls[number].slot, []).append(number)
            yield from self._bringing(step, number, self.graph.calls[number].slot)
        if self.units:
            for number in numbers:
                yield from self._room(step, number, self.places[self.graph.calls[number].slot].mask, slots)
        costs = {slot: [self._cost(number) for number in of_role] for slot, of_role in slots.items()}
        taken_s = taken_together_s([(self.places[slot], of_role) for slot, of_role in costs.items()], self.orders)
        for slot, of_role in slots.items():
            role, mask, start = self.graph.slots[slot].role, self.places[slot].mask, self.clock.now_s
            self._stale |= {copies for copies in self.copies if copies.role == role}
            whole_s = sum(cost.seconds for cost in costs[slot])
            for number, cost in zip(of_role, costs[slot], strict=True):
                call, end = self.graph.calls[number].call, start + taken_s * cost.seconds / whole_s
                self.actions.append(Action(call, KIND["train"], role, mask, start, end, step, number, cost.bytes))
                start = end
        yield from self._waiting(KIND["train"], taken_s)

    def _work(self, step: int, number: int, task: Task) -> Work[None]:
        call = self.graph.calls[number]
        slot, place = self.graph.slots[call.slot], self.places[call.slot]
        for needed_slot in (call.slot, *call.deciding):
            yield from self._bringing(step, number, needed_slot)
        task.mesh = self._atoms[self._meshes[number]]
        if self.units:
            yield from self._room(step, number, place.mask, {call.slot, *call.deciding})
        if slot.mode == "train":
            self._stale |= {copies for copies in self.copies if copies.role == slot.role}
        now, cost = self.clock.now_s, self._cost(number)
        seconds = place.seconds[self.graph.calls_of[call.slot].index(number)]
        end = None
        if slot.mode == "decode":
            seconds += self._ending(number, place)
            first = now + min(seconds, cost.first_s)
            self._generated[number] = (now, first, now + seconds)
        elif (source := self._sources[number]) in self._generated and now < self._generated[source][2]:
            assert source is not None
            others_s = 0.0
            if not self.units:
                # Calls that wait for samples share their ranks: all end as if one call did their work.
                before = self._streaming.setdefault(source, [])
                others_s = sum(other.seconds for other in before if other.mask & place.mask)
                before.append(_Streaming(task, task.mesh, place.mask, seconds))
                task.mesh = frozenset()
            end = _streamed(now, others_s + seconds, place.chunks, *self._generated[source])
        elif number in self._spare:
            seconds += cost.in_parts_s
            seconds -= self._spare[number].hidden(place.mask, seconds)
        end = now + seconds if end is None else end
        kind = KIND[slot.mode]
        yield from self._taking(
            Action(call.call, kind, slot.role, place.mask, end - seconds, end, step, number, cost.bytes)
        )
        for other in self._streaming.get(number, ()):
            other.task.mesh = other.mesh  # there is no sample left to wait for, and no rank does two things at once

    def _cost(self, number: int) -> CallCost:
        slot = self.graph.calls[number].slot
        return self.places[slot].costs[self.graph.calls_of[slot].index(number)]

    def _ending(self, number: int, place: Place) -> float:
        """By how much a generation ends later (below 0, sooner) if its last samples are gathered."""
        tails = place.tails(self.graph.calls_of[place.slot].index(number))
        if not self.graph.fuses or not tails:
            return 0.0
        scores = [(call, self.places[self.graph.calls[call].slot]) for call in self.graph.scores_of[number]]
        shared = {
            call: other.seconds[self.graph.calls_of[other.slot].index(call)]
            for call, other in scores
            if other.mask & place.mask and other.slot not in self._brought
        }
        if not shared:
            return 0.0
        spare = spare_of(tails, place.num_instances, sum(shared.values()))
        self._spare |= dict.fromkeys(shared, spare)
        return spare.end_s

    def _bringing(self, step: int, number: int, slot: int) -> Work[None]:
        """Move the role's weights to a slot whose copies are stale."""
        behind = [stale for stale in self.copies if slot in stale.slots and stale in self._stale]
        for copies in behind:
            self._stale.discard(copies)
            if self.units:
                home = self.graph.home_of(copies.role)
                yield from self._room(step, number, copies.movers, {home}, filled=copies)
            now = self.clock.now_s
            name = f"{copies.role}.weights"
            yield from self._taking(
                Action(name, MOVE, copies.role, copies.movers, now, now + copies.seconds, step, number, copies.bytes)
            )

    def _room(
        self, step: int, number: int, mask: int, slots: Collection[int | None], filled: Copies | None = None
    ) -> Work[None]:
        """Offload from these ranks what the slots do not need, and load what they need."""
        needed = [unit for unit in self.units if not unit.slots.isdisjoint(slots)]
        written = [unit for unit in self.units if filled is not None and unit.slots & filled.slots]
        if filled is not None:
            needed = [unit for unit in needed if not unit.name.endswith(".state")]
        leaves, loads = [], []
        for unit in self.units:
            if unit in needed:
                if away := unit.mask & mask & ~self._there[unit]:
                    loads.append((unit, away, unit.load_s))
                    self._there[unit] |= away
            elif unit in written:
                self._there[unit] |= unit.mask & mask
            elif present := self._there[unit] & mask:
                leaves.append((unit, present, unit.leave_s))
                self._there[unit] &= ~mask
                if unit.copies is not None:
                    self._stale.add(unit.copies)
        for kind, entries in ((LEAVE, leaves), (LOAD, loads)):
            yield from self._copying(kind, entries, step, number)

    def _copying(self, kind: str, entries: Iterable[tuple[Unit, int, float]], step: int, number: int) -> Work[None]:
        """Copy units to or from host memory, one after another on each rank."""
        begun = self.clock.now_s
        ends: list[tuple[int, float]] = []
        for unit, mask, seconds in entries:
            if seconds > 0:
                start = max((end for other, end in ends if other & mask), default=begun)
                ends.append((mask, start + seconds))
                self.actions.append(Action(unit.name, kind, unit.role, mask, start, start + seconds, step, number))
        if ends:
            yield from self._waiting(kind, max(end for _, end in ends) - begun)

    def _leaving(self, step: int) -> Work[None]:
        """At the end of a step, offload all that may leave."""
        yield from self._room(step, len(self.graph.calls), self._everywhere, ())

    def _taking(self, action: Action) -> Work[None]:
        self.actions.append(action)
        yield from self._waiting(action.kind, action.end_s - self.clock.now_s)

    def _waiting(self, kind: str, seconds: float) -> Work[None]:
        yield from self.clock.spend(_DONE[kind], seconds)

    def end_step(self) -> None:
        for known in (self._generated, self._streaming, self._spare):
            known.clear()


def _streamed(now: float, seconds: float, chunks: int, begun: float, first: float, ended: float) -> float:
    """When scoring in equal parts ends, if samples end evenly during generation, and none before `first`.

    Part k of n begins when its samples have ended (at begun + k/n of generation) and the part before is scored. So the
    end is the latest of: all parts from now on; all parts from the end of the first part's samples; the last part from
    the end of generation.
    """
    first = max(first, begun + (ended - begun) / chunks)
    return max(now + seconds, first + seconds, ended + seconds / chunks)

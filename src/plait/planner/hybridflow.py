"""HybridFlow's auto-mapping (arXiv 2409.19256, algorithms 1 and 2): which models share devices, how many devices each
of these sets has, and how each call is cut there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from math import inf

from plait.layout.mesh import Parallelism
from plait.planner.plan_space import PlanSpace
from plait.planner.slot_forms import Form
from plait.schedule.plan import After
from plait.simulator.places import Place

MOST_UNITS = 16
"""Parts of a cluster that are dealt out: what is tried grows with the fifth power of their number, of six models."""
STAGES = (("decode",), ("score",), ("train",))
"""Modes of calls that go on at a time: each stage waits for the slowest set."""

Members = tuple[str, ...]
"""Roles that share devices."""
Strategy = Mapping[int, Form]
"""The form of each slot of a set."""


def hybridflow(space: PlanSpace) -> tuple[Place, ...] | None:
    """The mapping of least cost, in which every device has room for all that its set keeps; where none has, the one
    that has room if models that idle are in host memory, as its engine can put them there. None: that has none either.
    """
    afters: tuple[After, ...] = ("keep", "offload")
    for after in afters:
        mapping = _Mapper(space, after).best()
        if mapping is not None:
            return mapping
    return None


def set_partitions(items: Sequence[str]) -> Iterator[list[list[str]]]:
    """Every way to put items into sets; as many as Bell's number."""
    if not items:
        yield []
        return
    first, *rest = items
    for parts in set_partitions(rest):
        yield [[first], *parts]
        for place, part in enumerate(parts):
            yield [*parts[:place], [first, *part], *parts[place + 1 :]]


def compositions(total: int, least: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to deal `total` out in order, at least `least` to each."""
    spare = total - sum(least)
    if spare < 0:
        return
    for cuts in combinations(range(spare + len(least) - 1), len(least) - 1):
        ends = (-1, *cuts, spare + len(least) - 1)
        yield tuple(low + ends[i + 1] - ends[i] - 1 for i, low in enumerate(least))


class _Mapper:
    """Algorithm 1. Devices are dealt out in equal units, `MOST_UNITS` at most; the last set has what is left over.

    Args:
        after: what becomes of the memory of models while others of their set compute.
    """

    def __init__(self, space: PlanSpace, after: After) -> None:
        self._space = space
        self._after: After = after
        self._devices = space.problem.num_devices
        self._unit = -(-self._devices // MOST_UNITS)
        self._units = self._devices // self._unit
        costs = space.problem.costs
        connected = 0 if costs.connections is None else costs.connections.usual_bytes
        self._cluster, self._process_bytes = costs.cluster, sum(costs.process_terms.values()) + connected
        self.strategy = cache(self._strategy)
        self._fastest_s = cache(self._fastest)
        self._least_units = cache(self._least)

    def best(self) -> tuple[Place, ...] | None:
        """Cost is the sum over stages of the slowest set."""
        best: list[tuple[Members, int, int]] = []
        least_s = inf
        for sets in set_partitions(self._space.graph.roles):
            members = [tuple(roles) for roles in sets]
            for counts in compositions(self._units, [self._least_units(roles) for roles in members]):
                firsts = [sum(counts[:number]) for number in range(len(counts))]
                dealt = list(zip(members, firsts, counts, strict=True))
                if _cost_s([self._fastest_s(*part) for part in dealt]) >= least_s:
                    continue  # what has room is no faster
                strategies = [self.strategy(*part) for part in dealt]
                cost_s = _cost_s([self._stages_s(strategy) for strategy in strategies if strategy is not None])
                if None not in strategies and cost_s < least_s:
                    best, least_s = dealt, cost_s
        return self._places(best) if best else None

    def _places(self, dealt: Sequence[tuple[Members, int, int]]) -> tuple[Place, ...]:
        places: dict[int, Place] = {}
        for members, first, count in dealt:
            strategy = self.strategy(members, first, count)
            assert strategy is not None, "a set that was dealt devices has room there"
            for slot, form in strategy.items():
                places[slot] = self._space.place(slot, self._ranks(first, count), form, self._after)
        return self._space.lawful([places[slot] for slot in sorted(places)])

    def _ranks(self, first: int, count: int) -> tuple[int, ...]:
        end = self._devices if first + count == self._units else (first + count) * self._unit
        return tuple(range(first * self._unit, end))

    def _least(self, members: Members) -> int:
        """The least units on which a set has room, of any kind of devices; more than there are: none."""
        fitting = (
            count
            for count in range(1, self._units + 1)
            if any(self.strategy(members, first, count) is not None for first in self._firsts(count))
        )
        return next(fitting, self._units + 1)

    def _firsts(self, count: int) -> range:
        """Where so many units may begin that differ; the first alone where all devices are of one kind."""
        is_mixed = bool(self._cluster.kinds_of((0,)))
        return range(self._units - count + 1) if is_mixed else range(1)

    def _options(self, members: Members, first: int, count: int) -> dict[int, tuple[Form, ...]]:
        """The forms that each slot of a set may have, the fastest first."""
        slots = [slot for role in members for slot in self._space.graph.slots_of(role).values()]
        return {slot: self._space.forms.of(slot, self._ranks(first, count)) for slot in slots}

    def _fastest(self, members: Members, first: int, count: int) -> tuple[float, ...]:
        """Seconds of each stage, whether there is room or not."""
        options = self._options(members, first, count)
        if not all(options.values()):
            return (inf,) * len(STAGES)
        return self._stages_s({slot: forms[0] for slot, forms in options.items()})

    def _stages_s(self, strategy: Strategy) -> tuple[float, ...]:
        slots = self._space.graph.slots
        return tuple(
            sum(form.seconds for slot, form in strategy.items() if slots[slot].mode in modes) for modes in STAGES
        )

    def _strategy(self, members: Members, first: int, count: int) -> Strategy | None:
        """Algorithm 2: each call as fast as it can be, cut further where the set has no room so: first what saves the
        most memory for a second. None: there is no room."""
        options = self._options(members, first, count)
        if not all(options.values()):
            return None
        chosen = {slot: forms[0] for slot, forms in options.items()}
        limit = self._limit(first, count)
        while (needed := self._needed_bytes(chosen)) > limit:
            leaner = []
            for slot, forms in options.items():
                for number, form in enumerate(forms):
                    saved = needed - self._needed_bytes({**chosen, slot: form})
                    if saved > 0:
                        leaner.append(((form.seconds - chosen[slot].seconds) / saved, slot, number))
            if not leaner:
                leanest = {slot: min(forms, key=_all_bytes) for slot, forms in options.items()}
                return leanest if self._needed_bytes(leanest) <= limit else None
            _, slot, number = min(leaner)
            chosen[slot] = options[slot][number]
        return chosen

    def _limit(self, first: int, count: int) -> int:
        """Bytes beside the process itself, of the smallest device."""
        return min(self._cluster.memory_of(rank) for rank in self._ranks(first, count)) - self._process_bytes

    def _needed_bytes(self, strategy: Strategy) -> float:
        """Bytes of a device that has the fullest stage of everything. Equal layouts of a role share its weights."""
        if self._after == "keep":
            kept = sum(sum(layouts.values()) for layouts in self._by_layout(strategy, "static").values())
            return kept + max(form.active_bytes for form in strategy.values())
        by_role = [sum(layouts.values()) for layouts in self._by_layout(strategy, "weights").values()]
        # All models are read before any leaves, and the largest state is made beside them.
        read = sum(by_role) + max(form.static_bytes - max(form.asked.held) for form in strategy.values())
        return max(read, *by_role, *(_all_bytes(form) for form in strategy.values()))

    def _by_layout(self, strategy: Strategy, what: str) -> dict[str, dict[Parallelism, float]]:
        """Bytes of each role, by how it is cut."""
        by_role: dict[str, dict[Parallelism, float]] = {}
        for slot, form in strategy.items():
            layouts = by_role.setdefault(self._space.graph.slots[slot].role, {})
            num_bytes = form.static_bytes if what == "static" else float(max(form.asked.held))
            layouts[form.parallelism] = max(layouts.get(form.parallelism, 0.0), num_bytes)
        return by_role


def _cost_s(stages_of_sets: Sequence[tuple[float, ...]]) -> float:
    return sum(max(seconds) for seconds in zip(*stages_of_sets, strict=True))


def _all_bytes(form: Form) -> float:
    return form.static_bytes + form.active_bytes

"""What a plan will take: seconds of a step, a timeline, and the memory of every rank, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from plait.cost.costs import Costs
from plait.cost.prompts_apart import WAITING
from plait.errors import ConfigError
from plait.schedule.plan import Mode, Placement, Plan
from plait.schedule.timeline import MemoryPoint, Span, Timeline
from plait.schedule.work import COMPUTE, LINK
from plait.simulator.joint_orders import STEP_TERMS, shares_of
from plait.simulator.places import Place, Places, ranks_of
from plait.simulator.step_graph import StepGraph
from plait.simulator.step_memory import RankMemory, memory_of, pool_bytes, standing_bytes, working_bytes
from plait.simulator.step_program import Action
from plait.simulator.step_simulator import Played, StepSimulator
from plait.simulator.step_weights import Weights, kept_bytes

STEPS = 3
"""That a prediction plays: the first begins with weights that must be moved, as all others do."""


@dataclass(frozen=True)
class CallRecord:
    """A call of a step, or a move or copy of weights that it needs.

    call:  its name in the flow; of moves and copies as in a timeline, such as `actor.weights`
    kind:  DECODE, SCORE, TRAIN, FUNCTIONS, MOVE, ONLOAD, OFFLOAD
    placements: where a call runs
    start_s: from the start of the step
    terms: what the seconds are spent on
    """

    call: str
    kind: str
    start_s: float
    seconds: float
    bytes: int
    placements: tuple[Placement, ...] = ()
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def mode(self) -> Mode | None:
        return self.placements[0].mode if self.placements else None


@dataclass(frozen=True)
class Prediction:
    """calls: of one step, by their start; feasible: every rank has room for what it holds, at any time"""

    seconds_per_step: float
    timeline: Timeline
    calls: tuple[CallRecord, ...]
    memory: tuple[RankMemory, ...]

    @property
    def feasible(self) -> bool:
        return all(rank.fits for rank in self.memory)


def predict(plan: Plan, graph: StepGraph, costs: Costs, *, steps: int = STEPS) -> Prediction:
    """Play steps of a completed plan.

    Raises:
        ConfigError: the plan has more ranks than the cluster of the costs has devices; or as `places_of`.
    """
    played, weights = _played(plan, graph, costs, steps)
    places = played.places
    ranks = {mask: ranks_of(mask) for mask in {action.mask for action in played.actions}}
    spans = tuple(
        span
        for action in played.actions
        for span in _spans(action, ranks[action.mask], _terms(action, graph, places), _busy_s(action, graph, places))
    )
    points = tuple(_points(played, graph, places, weights, ranks, costs))
    return Prediction(
        played.step_s,
        Timeline(spans, points).ordered(),
        _records(played, graph, places, steps - 1),
        tuple(memory_of(graph, places, weights, costs)),
    )


def step_seconds(plan: Plan, graph: StepGraph, costs: Costs) -> float:
    """`predict(...).seconds_per_step`, in a part of the time.

    Raises:
        ConfigError: as of `predict`.
    """
    return _played(plan, graph, costs, STEPS)[0].step_s


def _played(plan: Plan, graph: StepGraph, costs: Costs, steps: int) -> tuple[Played, tuple[Weights, ...]]:
    if plan.num_ranks > (most := costs.cluster.mesh_cluster.num_devices):
        raise ConfigError(
            f"plan `{plan.name}`: its `num_ranks`, {plan.num_ranks}, are more than the {most} devices of the cluster"
        )
    places = places_of(plan, Places(graph, costs, plan.num_ranks))
    simulator = StepSimulator(graph, costs)
    return simulator.play(places, steps=steps, orders=shares_of(plan, costs)), simulator.weights(places)


def places_of(plan: Plan, places: Places) -> list[Place]:
    """The place of each slot, in a completed plan.

    Raises:
        ConfigError: it computes prompts on other instances than samples, and the cluster is one of another system.
    """
    graph = places.graph
    apart = next((p for p in plan.placements if p.mode == "prefill"), None)
    if apart is not None and places.costs.pool_takes_rest:
        raise ConfigError(
            f"plan `{plan.name}`: {apart.call} computes its prompts on other ranks (`mode` prefill) than its samples, "
            "which is not predicted of pools of keys and values that take what else is left"
        )
    placed = []
    for number, slot in enumerate(graph.slots):
        call = graph.calls[graph.calls_of[number][0]].call
        placements = plan.placements_of(call, slot.mode)
        assert placements, f"the plan {plan.name} does not place {call}"
        if slot.mode == "decode":
            placements += plan.placements_of(call, "prefill")
        placed.append(places.place(number, placements))
    return placed


def _busy_s(action: Action, graph: StepGraph, places: Sequence[Place]) -> Mapping[int, tuple[float, float]] | None:
    """Rank → when it begins to compute, and when it has, where prompts have devices of their own: ranks that draw wait
    for them, the others end sooner, and who has no prompt does nothing. None: all ranks compute all the time."""
    slot = graph.calls[action.call].slot if action.kind == "DECODE" else None
    if slot is None or not (place := places[slot]).is_apart:
        return None
    number, busy = graph.calls_of[slot].index(action.call), dict[int, tuple[float, float]]()
    for p, answer in zip(place.placements, place.asked, strict=True):
        cost = answer.calls[number]
        for instance, seconds in zip(p.layout.instances(), cost.instance_seconds, strict=True):
            begins_s, ends_s = action.start_s + cost.terms.get(WAITING, 0.0), action.end_s
            if p.mode == "prefill":
                ends_s = min(ends_s, action.start_s + seconds)
            if seconds > 0:
                busy |= dict.fromkeys(instance.mesh.ranks, (begins_s, ends_s))
    return busy


def _spans(
    action: Action,
    ranks: Sequence[int],
    terms: Mapping[str, float],
    busy_s: Mapping[int, tuple[float, float]] | None,
) -> Iterator[Span]:
    """The action on each of its ranks, while it computes; of training, the optimizer steps apart, all behind the last
    of its micro-batches."""
    lane = COMPUTE if action.kind in ("DECODE", "SCORE", "TRAIN") else LINK
    share, steps_s = action.bytes // max(1, len(ranks)), 0.0
    if action.kind == "TRAIN" and (whole_s := sum(terms.values())) > 0:
        of_steps = sum(seconds for name, seconds in terms.items() if name in STEP_TERMS) / whole_s
        steps_s = of_steps * (action.end_s - action.start_s)
    until_s, step = action.end_s - steps_s, action.step + 1
    for rank in ranks if busy_s is None else sorted(busy_s):
        start_s, end_s = (action.start_s, until_s) if busy_s is None else busy_s[rank]
        yield Span(action.name, action.kind, rank, start_s, end_s, share, 0, lane, action.role, step)
        if steps_s > 0:
            yield Span(f"{action.name}/step", "STEP", rank, until_s, action.end_s, 0, 0, lane, action.role, step)


def _records(played: Played, graph: StepGraph, places: Sequence[Place], step: int) -> tuple[CallRecord, ...]:
    """The calls of one step."""
    begun = played.ends_s[step - 1] if step else 0.0
    records = []
    for action in played.actions:
        if action.step != step:
            continue
        seconds = action.end_s - action.start_s
        if action.kind not in ("DECODE", "SCORE", "TRAIN"):
            records.append(CallRecord(action.name, action.kind, action.start_s - begun, seconds, action.bytes))
            continue
        placements = places[graph.calls[action.call].slot].placements
        terms = dict(_terms(action, graph, places))
        start_s = action.start_s - begun
        records.append(CallRecord(action.name, action.kind, start_s, seconds, action.bytes, placements, terms))
    return tuple(sorted(records, key=lambda call: call.start_s))


def _terms(action: Action, graph: StepGraph, places: Sequence[Place]) -> Mapping[str, float]:
    """What a call's seconds are spent on; of anything else nothing is said."""
    if action.kind not in ("DECODE", "SCORE", "TRAIN"):
        return {}
    slot = graph.calls[action.call].slot
    return places[slot].costs[graph.calls_of[slot].index(action.call)].terms


def _points(
    played: Played,
    graph: StepGraph,
    places: Sequence[Place],
    weights: Sequence[Weights],
    ranks: dict[int, tuple[int, ...]],
    costs: Costs,
) -> Iterator[MemoryPoint]:
    """What each rank holds from the start of each call, and from its end."""
    standing, messages = standing_bytes(graph, places, weights, costs)
    kept = kept_bytes(weights) + standing + messages + pool_bytes(graph, places)
    present = {slot: num_bytes for of_family in weights for slot, num_bytes in of_family.present.items()}
    for rank in range(len(kept)):
        yield MemoryPoint(rank, 0.0, float(kept[rank]))
    for action in played.actions:
        if action.kind not in ("DECODE", "SCORE", "TRAIN"):
            continue
        slot = graph.calls[action.call].slot
        with_weights, working = kept + present[slot], working_bytes(graph, places[slot])
        for rank in ranks[action.mask]:
            yield MemoryPoint(rank, action.start_s, float(with_weights[rank] + working[rank]))
            yield MemoryPoint(rank, action.end_s, float(with_weights[rank]))

"""Memory of each device under a plan, for a dry run: who holds which part of which model, and what during which call.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from plait.cost.call_memory import (
    ACTIVATIONS,
    PACKED,
    cached_bytes,
    joint_rows,
    plain_activations,
    pool_of,
    working_rows,
)
from plait.cost.draft_memory import draft_widened
from plait.cost.estimate import Rows
from plait.cost.generation_memory import widened_bytes
from plait.cost.held_parameters import HeldPart, held_parts, rows_of, with_engine
from plait.cost.kept_sets import NO_SETS, SETS, reads_sets
from plait.cost.lengths import SampleLengths
from plait.cost.model_parameters import parameters_of
from plait.cost.offload_policy import Use
from plait.cost.placed import Facts, Kind
from plait.cost.sample_sets import share_bytes
from plait.cost.step_room import STEP
from plait.cost.working_memory import MESSAGES, NCCL, Expected, keeps_freed, process_terms, slack_rows
from plait.cost.workload import Samples
from plait.dataflow import CallKind, Dataflow, Node
from plait.dataflow.made_rows import prompts_each
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.kept_pools import keeps_memory
from plait.schedule.plan import SEVERAL, Plan

READING = "reading models"
PARKED = "parked samples"


@dataclass
class DeviceMemory:
    """What devices that are alike hold. An estimate."""

    ranks: list[int]
    rows: Rows
    """All of a step's parts, though some may never be there at once."""
    during: Rows
    """(a call or other work, all bytes that are held during it)."""
    slack: Rows
    """What may come on top."""
    host: Rows = field(default_factory=list)
    """What it has in memory of its host, at most; of a CPU it is among the rows."""

    @property
    def expected_bytes(self) -> int:
        """The most that is held at a time, as far as it is expected."""
        return max(count for _, count in self.during)

    @property
    def most_bytes(self) -> int:
        """An upper bound of what is held at a time."""
        return self.expected_bytes + sum(count for _, count in self.slack)


def memory_of_plan(
    recipe: Recipe,
    flow: Dataflow,
    models: Sequence[RoleModel],
    shapes: Mapping[str, ModelShape],
    plan: Plan,
    lengths: SampleLengths,
) -> list[DeviceMemory]:
    """What a dry run says of the memory of each device. Imports torch.

    Args:
        models: which model each role begins as.
        shapes: by the model's name.
        plan: completed.
        lengths: of the prompts, of responses at most, and of what is given, as predictions count them.
    """
    return memory_by_device(Facts(recipe, models, shapes, parameters_of(models), plan, flow, lengths))


def memory_by_device(facts: Facts) -> list[DeviceMemory]:
    """The memory of all devices; those that hold as much of everything (to the MiB) together."""
    return list(unlike_devices(facts))


def unlike_devices(facts: Facts) -> Iterator[DeviceMemory]:
    """The devices of `memory_by_device`, as an iterator: a caller may stop early. The ranks that are like each device
    are complete after the last one."""
    of_kinds: dict[Kind, DeviceMemory] = {}
    devices: list[DeviceMemory] = []
    for rank in range(facts.plan.num_ranks):
        if (same := of_kinds.get(kind := facts.kind(rank))) is None:
            new = _of_device(rank, facts)
            same = next((o for o in devices if all(_rounded(a) == _rounded(b) for a, b in _pairs(o, new))), None)
            if same is None:
                devices.append(new)
                yield new
            of_kinds[kind] = same or new
        if same is not None:
            same.ranks.append(rank)


def _pairs(one: DeviceMemory, other: DeviceMemory) -> Iterator[tuple[Rows, Rows]]:
    yield one.rows, other.rows
    yield one.during, other.during
    yield one.slack, other.slack
    yield one.host, other.host


def _rounded(rows: Rows) -> Rows:
    return [(what, round(count / 2**20)) for what, count in rows]


def _of_device(rank: int, facts: Facts) -> DeviceMemory:
    held = held_parts(rank, facts)
    working = {use: rows for model in facts.models for use, rows in working_rows(rank, facts, model).items()}
    working |= joint_rows(facts, working)
    rows: Rows = [*_process(rank, facts).items(), *rows_of(held)]
    largest: dict[str, int] = {}
    packed: dict[str, int] = {}
    for (role, mode), of_use in working.items():
        for what, count in of_use:
            if mode == "decode" and what == PACKED:
                packed[role] = count
            elif mode == "decode":
                rows.append((f"{role}: {what}", count))
            else:
                largest[what] = max(largest.get(what, 0), count)
    rows += largest.items()
    # Keys, values and the copy are given back before anything is trained or scored: what of that goes back, too, makes
    # room for it.
    left = largest.get(ACTIVATIONS, 0) if keeps_freed(facts.recipe.device) else 0
    others = sum(largest.values()) - left
    rows += [
        (f"{role}: {PACKED}, beyond other temporary memory", n - others) for role, n in packed.items() if n > others
    ]
    during = _during(rank, facts, held, working, left)
    most = max(count for _, count in during)
    roles = {p.call: p.role for p in facts.plan.placements if p.mode == "decode"}
    draft_extra = len(with_engine(rank, facts)) * draft_widened(facts.recipe, facts.shapes)
    grown = {call: widened_bytes(packed.get(role, 0), facts.recipe.dtype) for call, role in roles.items()}
    slack = slack_rows(
        facts.recipe.device,
        Expected(
            activations=largest.get(ACTIVATIONS, 0),
            plain=plain_activations(rank, facts),
            weights=max((part.num_bytes for part in held if part.owner), default=0),
            working=most - during[0][1],
            widened=draft_extra + max(count + grown.get(what, 0) for what, count in during) - most,
        ),
        moves=facts.plan.num_ranks > 1 or not facts.offload_policy.keeps_all,
    )
    parked = parked_bytes(rank, facts) if facts.recipe.device != "cpu" else 0
    return DeviceMemory([rank], rows, during, slack, [(PARKED, parked)] if parked else [])


def _during(rank: int, facts: Facts, held: Sequence[HeldPart], working: Mapping[Use, Rows], left: int) -> Rows:
    """All that is held while models are read, first; during each call; while weights are moved. A pool that stays is
    there from the first rollout on.

    Args:
        left: bytes that training leaves with the process (`working_memory.keeps_freed`).
    """
    terms = _process(rank, facts)
    process = sum(terms.values())
    kept = process + sum(part.num_bytes for part in held if part.after == "keep")
    pools = [use for use in working if use[1] == "decode" and _keeps_pool(rank, facts)]
    kept += sum(count for use in pools for what, count in working[use] if what != STEP)
    leaving = [part for part in held if part.after != "keep"]
    rows: Rows = [
        (READING, process - sum(terms.get(what, 0) for what in (MESSAGES, SETS, PARKED)) + _reading_bytes(held))
    ]
    for p in facts.plan.placements:
        use: Use = (p.role, "decode" if p.mode in SEVERAL else p.mode)
        if rank in p.ranks and use in working:
            uses = {use} if p.mode != "train" else {(role, "train") for role in facts.together(use[0])}
            there = sum(part.num_bytes for part in leaving if not part.uses.isdisjoint(uses))
            beside = left if use[1] == "decode" else 0
            own = sum(count for what, count in working[use] if use not in pools or what == STEP)
            rows.append((p.call, kept + there + own + beside))
    for model in facts.models:
        if (needed := facts.moved[model.role].get(rank)) is not None:
            owner = facts.offload_policy.owner(model.role)
            mine = [o for o in leaving if not o.is_state and o.owner == owner and o.key in needed]
            rows.append((f"{model.role}.weights (move)", kept + sum(part.num_bytes for part in mine)))
    return rows


def _keeps_pool(rank: int, facts: Facts) -> bool:
    """Whether what generation takes beside weights stays: what a CPU takes page by page does not."""
    trained, device = [model.role for model in facts.models if model.trained], facts.recipe.device
    return device == "cuda" and keeps_memory(rank, facts.plan, facts.places, trained, device)


def _process(rank: int, facts: Facts) -> Mapping[str, int]:
    terms = process_terms(facts.recipe.device, facts.plan.num_ranks)
    groups, messages = facts.connected[rank]
    if NCCL in terms:
        terms |= {NCCL: terms[NCCL] + groups}
    later = {MESSAGES: messages, SETS: _held_sets(rank, facts)}
    if facts.recipe.device == "cpu":
        later[PARKED] = parked_bytes(rank, facts)
    return terms | {what: count for what, count in later.items() if count}


def _reading_bytes(held: Sequence[HeldPart]) -> int:
    """Parts are read one after another and stay till all are there; the optimizer's state of a role leaves before that
    of the next is made. The few layers that a cut is proven on are there before the part, and not counted."""
    weights = sum(part.num_bytes for part in held if not part.is_state)
    states = [part for part in held if part.is_state]
    stay = sum(part.num_bytes for part in states if part.after == "keep")
    return weights + stay + max((part.num_bytes for part in states if part.after != "keep"), default=0)


def parked_bytes(rank: int, facts: Facts) -> int:
    """Bytes of host memory, at most, for keys and values of samples that are still between two versions of the weights
    (`partial_rollout: keep`), by the engines of a rank: of all that they run when new weights come, as long as each may
    be, its prompt in every one; with `tokens_per_version` of all samples of later batches, as long as they may be then.
    """
    recipe, total = facts.recipe, 0
    if recipe.partial_rollout != "keep":
        return 0
    for model in facts.models:
        instance = facts.places[model.role].drawing_on(rank)
        pool = None if instance is None else pool_of(facts, model, draws=True)
        if instance is None or pool is None or not model.trained:
            continue
        samples, context = pool.running, pool.context
        if recipe.tokens_per_version:
            said = recipe.sampling.max_response_tokens
            samples = recipe.max_staleness * pool.samples
            context -= said - min(said, recipe.max_staleness * recipe.tokens_per_version)
        total += samples * context * cached_bytes(rank, facts, model, instance)
    return total


def _held_sets(rank: int, facts: Facts) -> int:
    """Bytes of a CPU's memory that what samples were drawn from takes (a GPU's samples are in its host's): the first
    rank, which runs the flow, has all samples, every other one its share of those that it draws, scores or trains
    on."""
    recipe, flow = facts.recipe, facts.flow
    if recipe.device != "cpu" or not (recipe.sampling.filters or recipe.sampling.router_replay):
        return 0
    drawn = [_set_bytes(facts, node, 1) for node in flow.of_kind(CallKind.GENERATE)]
    shares = [0, (1 + recipe.max_staleness) * sum(drawn)] if rank == 0 else [0]
    for model in facts.models:
        place = facts.places[model.role]
        for node in flow.calls(model.role):
            if node.kind is CallKind.GENERATE and place.drawing_on(rank) is not None:
                shares.append(_set_bytes(facts, node, len(place.drawing)))
            layout = place.train if node.kind is CallKind.TRAIN else place.score if reads_sets(node) else None
            if layout is not None and rank in layout.mesh.ranks:
                shares.append(_set_bytes(facts, node, layout.parallelism.dp))
    return max(shares)


def _set_bytes(facts: Facts, node: Node, copies: int) -> int:
    """Bytes of what one of so many copies or instances has of a call."""
    rows, recipe, sets = facts.flow.nodes[node.rows], facts.recipe, facts.sets_of(node)
    if sets == NO_SETS:
        return 0
    count, most = recipe.samples_per_prompt, rows.generation.limit(recipe.sampling.max_response_tokens)
    prompts = recipe.prompts_per_step * prompts_each(facts.flow, rows, count)
    samples = Samples(prompts, rows.generation.num_samples(count))
    longest = facts.lengths_of[node.id].prompts.longest, most
    return share_bytes(node, samples, sets, copies, longest)

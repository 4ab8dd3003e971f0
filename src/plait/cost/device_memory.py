"""Memory of each device under a plan, for a dry run: who holds which part of which model, and what during which call.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from plait.cost.aliasing import Aliasing, flat_of
from plait.cost.estimate import PROCESS, Rows, adapter_parameters
from plait.cost.generation_memory import packed_bytes, pool_tokens
from plait.cost.held_memory import optimizer_bytes
from plait.cost.offload_policy import OffloadPolicy, Owner, Use
from plait.cost.working_memory import (
    PROCESS_BYTES,
    LargestBatch,
    activation_bytes,
    head_gradient_bytes,
    is_fused,
    is_packed,
    logits_bytes,
    slack_rows,
)
from plait.dataflow import CallKind, Dataflow
from plait.layout.mesh import Layout
from plait.layout.params import Heads, Parameters
from plait.layout.shards import shard, stage_bounds, zero_range
from plait.models.shape import ModelShape
from plait.policy.blocks import BLOCK_TOKENS
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.schedule.fused import FusedOrder
from plait.schedule.placements import WHOLE, PartKey, RolePlacement, part_key, placements_of
from plait.schedule.plan import After, Mode, Plan
from plait.schedule.stated import StatedOrder
from plait.training.memory import BYTES, parameter_bytes


@dataclass
class DeviceMemory:
    """What devices that are alike hold. An estimate."""

    ranks: list[int]
    rows: Rows
    """All of a step's parts, though some may never be there at once."""
    during: Rows
    """(a call, or what else is done, all that is held then); empty where nothing ever leaves the device."""
    slack: Rows
    """What may come on top."""

    @property
    def expected_bytes(self) -> int:
        """The most that is held at a time, as far as it is expected; where nothing leaves, all of it together."""
        return max((count for _, count in self.during), default=sum(count for _, count in self.rows))

    @property
    def most_bytes(self) -> int:
        """An upper bound of what is held at a time."""
        return self.expected_bytes + sum(count for _, count in self.slack)


@dataclass(frozen=True)
class Placed:
    """What the memory of a device's parameters depends on.

    shapes:         by the model's name
    parameters:     by the role
    """

    recipe: Recipe
    models: Sequence[RoleModel]
    shapes: Mapping[str, ModelShape]
    parameters: Mapping[str, Parameters]
    plan: Plan

    @cached_property
    def places(self) -> Mapping[str, RolePlacement]:
        """By the role."""
        return {one.role: placements_of(self.plan, one.role) for one in self.models}

    @cached_property
    def offload_policy(self) -> OffloadPolicy:
        return OffloadPolicy(self.models, self.plan, adapted=self.recipe.lora.rank > 0)

    @cached_property
    def aliasing(self) -> Aliasing:
        return Aliasing(self.models, self.plan, self.offload_policy, self.recipe.dtype, self.parameters.__getitem__)

    @cached_property
    def moved(self) -> Mapping[str, Mapping[int, frozenset[PartKey]]]:
        """Role → rank that takes part in a move of its weights → the parts that it needs for that."""
        found: dict[str, dict[int, frozenset[PartKey]]] = {}
        for role, place in self.places.items():
            needed: dict[int, set[PartKey]] = {}
            for copies in self.offload_policy.copies(role):
                for rank in copies.ranks:
                    needed.setdefault(rank, set())
                for rank, key in copies.parts:
                    needed[rank].add(key)
            for rank in needed.keys() & set(place.home.mesh.ranks):
                needed[rank].add(part_key(place.home, rank))
            found[role] = {rank: frozenset(keys) for rank, keys in needed.items()}
        return found

    @cached_property
    def alike(self) -> list[list[int]]:
        """All ranks, ascending; together those that differ in nothing that decides how much they hold."""
        found: dict[tuple[object, ...], list[int]] = {}
        for rank in range(self.plan.num_ranks):
            found.setdefault(_kind(rank, self), []).append(rank)
        return list(found.values())


@dataclass(frozen=True)
class Facts(Placed):
    """What all of its memory depends on.

    longest_tokens: of the prompts; where nothing is generated, of the given samples
    """

    flow: Dataflow
    longest_tokens: int

    def together(self, role: str) -> tuple[str, ...]:
        """The roles that train when this one does."""
        order = self.places[role].schedule
        return order.roles if isinstance(order, FusedOrder) else (role,)


def memory_by_device(facts: Facts) -> list[DeviceMemory]:
    """The memory of all devices; those that hold as much of everything (to the MiB) together."""
    found: list[DeviceMemory] = []
    for ranks in facts.alike:
        one = replace(_of_device(ranks[0], facts), ranks=ranks)
        other = next((o for o in found if all(_rounded(a) == _rounded(b) for a, b in _pairs(o, one))), None)
        if other is None:
            found.append(one)
        else:
            other.ranks = sorted(other.ranks + ranks)
    return found


def _kind(rank: int, placed: Placed) -> tuple[object, ...]:
    """All that the memory of a device depends on: its coordinates in the layouts of each role, who computes there,
    which of these parts are one, and what leaves. Devices of one kind hold as much."""
    numbers: dict[PartKey, int] = {}
    kinds: list[object] = []
    for role, place in placed.places.items():
        for layout in place.layouts_on(rank):
            number = numbers.setdefault(part_key(layout, rank), len(numbers))
            at, sizes = layout.coordinates(rank), layout.parallelism
            uses = (layout == place.train, layout == place.score, layout == place.instance_on(rank))
            kinds.append((role, uses, at.tp, at.pp, sizes, number))
            if uses[0]:
                once = shard(placed.parameters[role], sizes, at.tp, at.pp, once=True).num_elements
                start, stop = zero_range(once, at.dp, sizes.dp)
                kinds.append(stop - start)
        kinds += [place.after.get((mode, rank)) for mode in ("train", "score", "decode")]
        if (needed := placed.moved[role].get(rank)) is not None:
            kinds.append(frozenset(numbers[key] for key in needed))
    return tuple(kinds)


def _pairs(one: DeviceMemory, other: DeviceMemory) -> Iterator[tuple[Rows, Rows]]:
    yield one.rows, other.rows
    yield one.during, other.during
    yield one.slack, other.slack


def _rounded(rows: Rows) -> Rows:
    return [(what, round(count / 2**20)) for what, count in rows]


def _of_device(rank: int, facts: Facts) -> DeviceMemory:
    held = _parameters(rank, facts)
    working = {use: rows for one in facts.models for use, rows in _working(rank, facts, one).items()}
    working |= _joint(facts, working)
    rows: Rows = [(PROCESS, PROCESS_BYTES), *_rows(held)]
    largest: dict[str, int] = {}
    packed: dict[str, int] = {}
    for (role, mode), of_use in working.items():
        for what, count in of_use:
            if mode == "decode" and what == _PACKED:
                packed[role] = count
            elif mode == "decode":
                rows.append((f"{role}: {what}", count))
            else:
                largest[what] = max(largest.get(what, 0), count)
    rows += largest.items()
    # The copy is given back before anything is trained or scored, so what those take alone makes room for it.
    others = sum(largest.values())
    rows += [(f"{role}: {_PACKED}, beyond activations", n - others) for role, n in packed.items() if n > others]
    during = [] if facts.offload_policy.keeps_all else _during(rank, facts, held, working)
    slack = slack_rows(
        facts.recipe,
        activations=largest.get(ACTIVATIONS, 0),
        plain=_plain_activations(rank, facts),
        weights=max((one.num_bytes for one in held if not one.is_state), default=0),
        working=sum(count for _, count in rows) - PROCESS_BYTES - sum(one.num_bytes for one in held),
        moves=bool(during) or facts.plan.num_ranks > 1,
    )
    return DeviceMemory([rank], rows, during, slack)


def _plain_activations(rank: int, facts: Facts) -> int:
    """Activations of the largest call, of a family whose layers are not fused."""
    found = [0]
    for one in facts.models:
        place = facts.places[one.role]
        asked: tuple[tuple[Mode, Layout | None], ...] = (("train", place.train), ("score", place.score))
        for mode, layout in asked:
            if layout is not None and rank in layout.mesh.ranks:
                found.append(_activations(rank, facts, one, mode, layout, fused=False))
    return max(found)


def _during(rank: int, facts: Facts, held: Sequence[_Held], working: Mapping[Use, Rows]) -> Rows:
    """All that is held while models are read, during each call, and while weights are moved."""
    kept = PROCESS_BYTES + sum(one.num_bytes for one in held if one.after == "keep")
    leaving = [one for one in held if one.after != "keep"]
    rows: Rows = [("reading models", PROCESS_BYTES + _reading_bytes(held))]
    for p in facts.plan.placements:
        use = (p.call.split(".")[0], p.mode)
        if rank in p.ranks and use in working:
            uses = {use} if p.mode != "train" else {(role, "train") for role in facts.together(use[0])}
            there = sum(one.num_bytes for one in leaving if not one.uses.isdisjoint(uses))
            rows.append((p.call, kept + there + sum(count for _, count in working[use])))
    for one in facts.models:
        if (needed := facts.moved[one.role].get(rank)) is not None:
            owner = facts.offload_policy.owner(one.role)
            mine = [o for o in leaving if not o.is_state and o.owner == owner and o.key in needed]
            rows.append((f"{one.role}.weights (move)", kept + sum(one.num_bytes for one in mine)))
    return rows


def _reading_bytes(held: Sequence[_Held]) -> int:
    """Parts are read one after another and stay till all are there; the optimizer's state of a role leaves before that
    of the next is made. The few layers that a cut is proven on are there before the part, and not counted."""
    weights = sum(one.num_bytes for one in held if not one.is_state)
    states = [one for one in held if one.is_state]
    stay = sum(one.num_bytes for one in states if one.after == "keep")
    return weights + stay + max((one.num_bytes for one in states if one.after != "keep"), default=0)


def _joint(facts: Facts, working: Mapping[Use, Rows]) -> dict[Use, Rows]:
    """What training calls of several roles take at the same time: activations of all, and one head at work."""
    found: dict[Use, Rows] = {}
    for role, mode in working:
        roles = facts.together(role) if mode == "train" else ()
        if len(roles) > 1:
            rows: dict[str, int] = {}
            for what, count in (row for one in roles for row in working.get((one, mode), ())):
                rows[what] = rows.get(what, 0) + count if what == ACTIVATIONS else max(rows.get(what, 0), count)
            found[role, mode] = list(rows.items())
    return found


_PACKED = "weights packed for decoding"
ACTIVATIONS = "activations"


def _working(rank: int, facts: Facts, one: RoleModel) -> dict[Use, Rows]:
    """What each kind of call of a role takes on a device beside parameters and optimizer state."""
    recipe, flow = facts.recipe, facts.flow
    place, shape, width = facts.places[one.role], facts.shapes[one.name], BYTES[recipe.dtype]
    found: dict[Use, Rows] = {}
    instance = place.instance_on(rank)
    if instance is not None and (
        cached := _cache_bytes(rank, recipe, flow, one.role, place, instance, shape, width, facts.longest_tokens)
    ):
        found[one.role, "decode"] = [("KV cache", cached)]
        if is_packed(recipe) and part_key(instance, rank) == WHOLE:
            found[one.role, "decode"].append((_PACKED, packed_bytes(shape, recipe.dtype)))
    asked: tuple[tuple[Mode, Layout | None], ...] = (("train", place.train), ("score", place.score))
    for mode, layout in asked:
        if layout is not None and rank in layout.mesh.ranks:
            found[one.role, mode] = _forward_rows(rank, facts, one, mode, layout)
    return found


def _forward_rows(rank: int, facts: Facts, one: RoleModel, mode: Mode, layout: Layout) -> Rows:
    """What a call that trains or scores takes."""
    recipe, shape, width = facts.recipe, facts.shapes[one.name], BYTES[facts.recipe.dtype]
    rows = [(ACTIVATIONS, _activations(rank, facts, one, mode, layout, fused=is_fused(recipe)))]
    if not one.scalar and layout.coordinates(rank).pp == layout.parallelism.pp - 1:
        rows.append(("logits of one chunk", logits_bytes(shape, width)))
        if mode == "train" and recipe.lora.rank == 0:
            rows.append(("gradient of the head", head_gradient_bytes(shape, width)))
    return [(what, count) for what, count in rows if count]


def micro_batch_bytes(facts: Facts, one: RoleModel, mode: Mode, layout: Layout, *, fused: bool) -> float:
    """What the largest micro-batch keeps of a layer of this rank."""
    recipe, shape, sizes = facts.recipe, facts.shapes[one.name], layout.parallelism
    tokens = facts.places[one.role].micro_batch_tokens.get(mode, recipe.micro_batch_tokens)
    share = {"prompts_per_step": -(-recipe.prompts_per_step // sizes.dp), "micro_batch_tokens": tokens}
    batch = LargestBatch.of(recipe.model_copy(update=share), facts.flow, facts.longest_tokens)
    whole = activation_bytes(shape, batch, BYTES[recipe.dtype], fused=fused, checkpointed=recipe.checkpoint_activations)
    return whole / shape.layers / sizes.tp


def _activations(rank: int, facts: Facts, one: RoleModel, mode: Mode, layout: Layout, *, fused: bool) -> int:
    """What micro-batches of the largest size keep of this rank's layers at a time."""
    # 1F1B: a stage has as many micro-batches in flight as there are stages from it to the end. Scoring keeps
    # nothing for a backward: one layer's activations at a time.
    stage, order = layout.coordinates(rank).pp, facts.places[one.role].schedule
    in_flight = order.in_flight[stage] if isinstance(order, StatedOrder) else layout.parallelism.pp - stage
    if isinstance(order, FusedOrder):  # or alone, by 1F1B
        in_flight = max(in_flight, order.in_flight[order.layout.coordinates(rank).pp][one.role])
    layers = in_flight * _stage_layers(layout, rank, facts.shapes[one.name]) if mode == "train" else 1
    return int(layers * micro_batch_bytes(facts, one, mode, layout, fused=fused))


@dataclass(frozen=True)
class _Held:
    """Weights or optimizer state on one device."""

    what: str
    num_bytes: int
    after: After
    uses: frozenset[Use]
    """That need it."""
    owner: Owner = ()
    key: PartKey = ()
    is_state: bool = False


def parameter_rows(rank: int, placed: Placed) -> Rows:
    """Weights and optimizer state of one device. A layout that gives the device the same part as another is a view of
    it, and what it gives of another's blocks lies in the memory of those; frozen roles that begin as the same share
    theirs, and with adapters all roles do."""
    return _rows(_parameters(rank, placed))


def _rows(held: Sequence[_Held]) -> Rows:
    """Several parts of a role's weights as one row."""
    together: dict[str, int] = {}
    for one in held:
        together[one.what] = together.get(one.what, 0) + one.num_bytes
    return list(together.items())


def _parameters(rank: int, placed: Placed) -> list[_Held]:
    recipe, parameters, offload_policy = placed.recipe, placed.parameters, placed.offload_policy
    adapted, width = recipe.lora.rank > 0, BYTES[recipe.dtype]
    weights: dict[tuple[Owner, PartKey], tuple[list[str], int]] = {}
    states: list[_Held] = []
    for one in placed.models:
        place = placed.places[one.role]
        for layout in place.layouts_on(rank):
            nest = placed.aliasing.of(one.role, rank).get(key := part_key(layout, rank))
            block = flat_of(parameters[one.role], layout, rank).num_elements if nest is None else nest.own
            part = (offload_policy.owner(one.role), key)
            names, _ = weights.setdefault(part, ([], block))
            if one.role not in names:
                names.append(one.role)
        if place.train is not None and rank in place.train.mesh.ranks:
            uses: frozenset[Use] = frozenset({(one.role, "train")})
            if adapted:
                count = adapter_parameters(placed.shapes[one.name], recipe.lora.rank)
                total = count * parameter_bytes(recipe.dtype, trained=True).total
                states.append(
                    _Held(
                        f"{one.role}: adapter, its masters, moments and gradients", total, "keep", uses, is_state=True
                    )
                )
            else:
                followed = any(other.follows == one.role for other in placed.models)
                at = place.train.coordinates(rank)
                total = optimizer_bytes(
                    parameters[one.role], place.train.parallelism, at.tp, at.pp, at.dp, recipe.dtype, followed=followed
                )
                after = offload_policy.of_state(one.role, rank)
                what = f"{one.role}: masters, moments and gradients"
                states.append(_Held(what, total, after, uses, is_state=True))
    found = []
    for (owner, key), (names, count) in weights.items():
        what = f"{', '.join(names)}: weights ({recipe.dtype})"
        used = frozenset(offload_policy.uses(names[0], rank, key))
        after = offload_policy.of_weights(names[0], rank, key)
        found.append(_Held(what, count * width, after, used, owner, key))
    return [replace(one, what=f"{one.what}, away when idle") if one.after != "keep" else one for one in found + states]


def _cache_bytes(
    rank: int,
    recipe: Recipe,
    flow: Dataflow,
    role: str,
    place: RolePlacement,
    instance: Layout,
    shape: ModelShape,
    width: int,
    longest_tokens: int,
) -> int:
    """Keys and values of the samples that an instance runs at a time: its layers, its heads."""
    calls = [node for node in flow.calls(role) if node.kind is CallKind.GENERATE]
    if not calls:
        return 0
    samples = recipe.prompts_per_step * max(n.generation.num_samples(recipe.samples_per_prompt) for n in calls)
    running = min(recipe.sampling.max_running, -(-samples // len(place.generate)))
    first, stop = Heads(shape.heads, shape.kv_heads, shared=True).part_range(
        instance.coordinates(rank).tp, instance.parallelism.tp
    )
    layers = _stage_layers(instance, rank, shape)
    per_token = 2 * layers * (stop - first) * shape.head_dim * width
    context = longest_tokens + recipe.sampling.max_response_tokens
    pool = recipe.sampling.num_blocks(shape.max_positions) * BLOCK_TOKENS
    return pool_tokens(running, context, pool, recipe.device) * per_token


def _stage_layers(layout: Layout, rank: int, shape: ModelShape) -> int:
    bounds, stage = stage_bounds(shape.layers, layout.parallelism), layout.coordinates(rank).pp
    return bounds[stage + 1] - bounds[stage]

"""Weights and optimizer state that a device holds under a plan. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.cost.draft_memory import drafts_on
from plait.cost.engine_memory import engine_rows
from plait.cost.estimate import Rows
from plait.cost.held_memory import optimizer_bytes, share_elements
from plait.cost.offload_policy import Owner, Use
from plait.cost.placed import Placed
from plait.cost.shape_parameters import adapter_by_stage
from plait.layout.shards import held_elements
from plait.recipes.engine_checks import abilities
from plait.recipes.role_models import optimizer_of
from plait.schedule.placements import PartKey, part_key
from plait.schedule.plan import After
from plait.training.memory import BYTES, parameter_bytes


@dataclass(frozen=True)
class HeldPart:
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
    return rows_of(held_parts(rank, placed))


def rows_of(held: Sequence[HeldPart]) -> Rows:
    """Several parts of a role's weights as one row."""
    together: dict[str, int] = {}
    for part in held:
        together[part.what] = together.get(part.what, 0) + part.num_bytes
    return list(together.items())


def held_parts(rank: int, placed: Placed) -> list[HeldPart]:
    """Each part of a model's weights, and each role's optimizer state, on one device."""
    recipe, parameters, offload_policy = placed.recipe, placed.parameters, placed.offload_policy
    adapted, width = recipe.lora.rank > 0, BYTES[recipe.dtype]
    weights: dict[tuple[Owner, PartKey], tuple[list[str], int]] = {}
    states: list[HeldPart] = []
    for model in placed.models:
        place = placed.places[model.role]
        for layout in place.layouts_on(rank):
            own = placed.aliasing.own_elements(model.role, rank).get(key := part_key(layout, rank))
            at, block = layout.coordinates(rank), own
            if layout.shards_weights:
                block = share_elements(parameters[model.role], layout, rank)
            elif block is None:
                block = held_elements(parameters[model.role], layout.parallelism, at.tp, at.pp)
            part = (offload_policy.owner(model.role), key)
            names, _ = weights.setdefault(part, ([], block))
            if model.role not in names:
                names.append(model.role)
        if place.train is not None and rank in place.train.mesh.ranks:
            uses: frozenset[Use] = frozenset({(model.role, "train")})
            if adapted:
                by_stage = adapter_by_stage(placed.shapes[model.name], recipe.lora, place.train.parallelism)
                count = by_stage[place.train.coordinates(rank).pp]
                total = count * parameter_bytes(recipe.dtype, trained=True).total
                states.append(
                    HeldPart(
                        f"{model.role}: adapter, its masters, moments and gradients", total, "keep", uses, is_state=True
                    )
                )
            else:
                followed = any(other.follows == model.role for other in placed.models)
                total = optimizer_bytes(
                    parameters[model.role],
                    place.train,
                    rank,
                    recipe.dtype,
                    followed=followed,
                    sharded=optimizer_of(model.role, recipe).shards_gradients,
                )
                after = offload_policy.of_state(model.role, rank)
                what = f"{model.role}: masters, moments and gradients"
                states.append(HeldPart(what, total, after, uses, is_state=True))
    held = []
    for (owner, key), (names, count) in weights.items():
        what = f"{', '.join(names)}: weights ({recipe.dtype})"
        used = frozenset(offload_policy.uses(names[0], rank, key))
        after = offload_policy.of_weights(names[0], rank, key)
        held.append(HeldPart(what, count * width, after, used, owner, key))
    held += [*states, *_engines(rank, placed)]
    return [replace(piece, what=f"{piece.what}, away when idle") if piece.after != "keep" else piece for piece in held]


def _engines(rank: int, placed: Placed) -> list[HeldPart]:
    """What the engines that generate on a device take beside the models of roles; it stays."""
    names = {model.role: model.name for model in placed.models}
    rows = [engine_rows(placed.recipe, placed.shapes, names[role]) for role in with_engine(rank, placed)]
    return [HeldPart(what, num_bytes, "keep", frozenset()) for of_role in rows for what, num_bytes in of_role]


def with_engine(rank: int, placed: Placed) -> list[str]:
    """Roles whose engines on a device take something beside the models of roles: one that drafts, or another
    program."""
    recipe = placed.recipe
    instances = {role: place.drawing_on(rank) for role, place in placed.places.items()}
    is_elsewhere = abilities(recipe).computes_elsewhere
    return [
        role
        for role, instance in instances.items()
        if instance is not None and (is_elsewhere or drafts_on(recipe, rank, instance))
    ]

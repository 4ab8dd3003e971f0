"""Memory of each device under a plan of several, for a dry run: who holds which part of which model. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.dataflow import CallKind, Dataflow
from plait.layout.mesh import Layout
from plait.layout.params import FlatLayout, Heads, Parameters
from plait.layout.shards import shard, stage_bounds, zero_range
from plait.models.shape import HEAD_CHUNK_ROWS, ModelShape
from plait.runtime.estimate import PROCESS_BYTES, LargestBatch, activation_bytes, adapter_parameters
from plait.runtime.recipe import Recipe
from plait.runtime.role_models import RoleModel
from plait.schedule.placements import RolePlacement, placements_of
from plait.schedule.plan import Mode, Plan
from plait.training.memory import BYTES, parameter_bytes

Rows = list[tuple[str, int]]
"""(what, bytes)."""


def memory_by_device(
    recipe: Recipe,
    flow: Dataflow,
    models: Sequence[RoleModel],
    shapes: Mapping[str, ModelShape],
    parameters: Mapping[str, Parameters],
    plan: Plan,
    longest_tokens: int,
) -> list[tuple[list[int], Rows]]:
    """(ranks, what each of them holds), ranks that hold as much of everything (to the MiB) together; arguments as of
    `device_rows`."""
    found: list[tuple[list[int], Rows]] = []
    for rank in range(plan.num_ranks):
        rows = device_rows(rank, recipe, flow, models, shapes, parameters, plan, longest_tokens)
        alike = next((ranks for ranks, others in found if _rounded(others) == _rounded(rows)), None)
        if alike is None:
            found.append(([rank], rows))
        else:
            alike.append(rank)
    return found


def _rounded(rows: Rows) -> Rows:
    return [(what, round(count / 2**20)) for what, count in rows]


def device_rows(
    rank: int,
    recipe: Recipe,
    flow: Dataflow,
    models: Sequence[RoleModel],
    shapes: Mapping[str, ModelShape],
    parameters: Mapping[str, Parameters],
    plan: Plan,
    longest_tokens: int,
) -> Rows:
    """What one device holds at most, all of a step's parts at once. An estimate, `estimate.memory_table` of a part.

    Args:
        shapes: by the model's name.
        parameters: by the role.
        longest_tokens: of the prompts; where nothing is generated, of the given samples.
    """
    rows = [("process: libraries and tokenizer", PROCESS_BYTES)]
    rows += parameter_rows(rank, recipe, models, shapes, parameters, plan)
    width = BYTES[recipe.dtype]
    activations = logits = head = 0
    for one in models:
        place, shape = placements_of(plan, one.role), shapes[one.name]
        if cached := _cache_bytes(rank, recipe, flow, one.role, place, shape, width, longest_tokens):
            rows.append((f"{one.role}: KV cache", cached))
        asked: tuple[tuple[Mode, Layout | None], ...] = (("train", place.train), ("score", place.score))
        for mode, layout in asked:
            if layout is None or rank not in layout.mesh.ranks:
                continue
            at, sizes = layout.coordinates(rank), layout.parallelism
            batch = LargestBatch.of(
                recipe.model_copy(
                    update={
                        "prompts_per_step": -(-recipe.prompts_per_step // sizes.dp),
                        "micro_batch_tokens": place.micro_batch_tokens.get(mode, recipe.micro_batch_tokens),
                    }
                ),
                flow,
                longest_tokens,
            )
            # 1F1B: a stage has as many micro-batches in flight as there are stages from it to the end. Scoring keeps
            # nothing for a backward: one layer's activations at a time.
            kept_layers = (sizes.pp - at.pp) * _stage_layers(layout, rank, shape) if mode == "train" else 1
            share = kept_layers / shape.layers / sizes.tp
            activations = max(activations, int(share * activation_bytes(recipe, shape, batch, width)))
            if not one.scalar and at.pp == sizes.pp - 1:
                logits = max(logits, HEAD_CHUNK_ROWS * shape.vocabulary * (width + 8))
                if mode == "train" and recipe.lora.rank == 0:
                    head = max(head, shape.vocabulary * shape.hidden * (4 + 2 * width))
    found = (("activations", activations), ("logits of one chunk", logits), ("gradient of the head", head))
    return rows + [(what, count) for what, count in found if count]


def parameter_rows(
    rank: int,
    recipe: Recipe,
    models: Sequence[RoleModel],
    shapes: Mapping[str, ModelShape],
    parameters: Mapping[str, Parameters],
    plan: Plan,
) -> Rows:
    """Weights and optimizer state of one device. A layout that gives the device the same block as another is a view of
    it; frozen roles that begin as the same share theirs, and with adapters all roles do."""
    rows: Rows = []
    held: dict[tuple[object, ...], tuple[list[str], int]] = {}
    adapted = recipe.lora.rank > 0
    for one in models:
        place = placements_of(plan, one.role)
        own = one.role if one.trained and not adapted else ""
        for layout in place.layouts:
            if rank in layout.mesh.ranks:
                flat = flat_of(parameters[one.role], layout, rank)
                key = (one.name, one.has_head if adapted else one.scalar, own, flat.blocks)
                names, _ = held.setdefault(key, ([], flat.num_elements))
                if one.role not in names:
                    names.append(one.role)
        if place.train is not None and rank in place.train.mesh.ranks:
            if adapted:
                count = adapter_parameters(shapes[one.name], recipe.lora.rank)
                total = count * parameter_bytes(recipe.dtype, trained=True).total
                rows.append((f"{one.role}: adapter, its masters, moments and gradients", total))
            else:
                what = f"{one.role}: masters, moments and gradients"
                rows.append((what, _optimizer_bytes(rank, recipe, parameters[one.role], place.train)))
    weights = [
        (f"{', '.join(names)}: weights ({recipe.dtype})", count * BYTES[recipe.dtype]) for names, count in held.values()
    ]
    return weights + rows


def flat_of(parameters: Parameters, layout: Layout, rank: int) -> FlatLayout:
    """The blocks that a rank of a layout holds."""
    at = layout.coordinates(rank)
    return shard(parameters, layout.parallelism, at.tp, at.pp)


def _optimizer_bytes(rank: int, recipe: Recipe, parameters: Parameters, layout: Layout) -> int:
    """Gradients are summed over the whole block, masters and moments are held for the range of this dp rank."""
    per, at = parameter_bytes(recipe.dtype, trained=True), layout.coordinates(rank)
    once = shard(parameters, layout.parallelism, at.tp, at.pp, once=True).num_elements
    start, stop = zero_range(once, at.dp, layout.parallelism.dp)
    gradients = flat_of(parameters, layout, rank).num_elements * per.gradients
    return (stop - start) * (per.masters + per.moments) + gradients


def _cache_bytes(
    rank: int,
    recipe: Recipe,
    flow: Dataflow,
    role: str,
    place: RolePlacement,
    shape: ModelShape,
    width: int,
    longest_tokens: int,
) -> int:
    """Keys and values of the samples that an instance runs at a time: its layers, its heads."""
    instance = next((one for one in place.generate if rank in one.mesh.ranks), None)
    calls = [node for node in flow.calls(role) if node.kind is CallKind.GENERATE]
    if instance is None or not calls:
        return 0
    samples = recipe.prompts_per_step * max(n.options["samples_per_prompt"] or recipe.samples_per_prompt for n in calls)
    running = min(recipe.sampling.max_running, -(-samples // len(place.generate)))
    first, stop = Heads(shape.heads, shape.kv_heads, shared=True).part_range(
        instance.coordinates(rank).tp, instance.parallelism.tp
    )
    layers = _stage_layers(instance, rank, shape)
    per_token = 2 * layers * (stop - first) * shape.head_dim * width
    return running * (longest_tokens + recipe.sampling.max_response_tokens) * per_token


def _stage_layers(layout: Layout, rank: int, shape: ModelShape) -> int:
    bounds, stage = stage_bounds(shape.layers, layout.parallelism), layout.coordinates(rank).pp
    return bounds[stage + 1] - bounds[stage]

"""What the calls of a plan take on a device beside parameters and optimizer state. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.cost.draft_memory import draft_cache, drafts_on
from plait.cost.estimate import Rows
from plait.cost.generation_memory import (
    asked_tokens,
    packed_stages,
    pool_tokens,
    routed_bytes_per_token,
    state_bytes,
)
from plait.cost.graph_memory import GRAPHS, first_context, graph_bytes, prompt_graph_bytes
from plait.cost.kept_sets import NO_SETS, ROUTED, SETS_READ, KeptSets, reads_sets
from plait.cost.layer_kinds import stage_counts
from plait.cost.lengths import Lengths
from plait.cost.micro_batch import LargestBatch
from plait.cost.offload_policy import Use
from plait.cost.placed import Facts
from plait.cost.prompts_apart import tokens_sent
from plait.cost.shared_root import held_root
from plait.cost.step_room import STEP, LargestStep, step_bytes
from plait.cost.working_memory import (
    Activations,
    Blocks,
    activations_by_kind,
    fused_at_worst,
    head_gradient_bytes,
    is_fused,
    is_packed,
    kept_logits,
    logits_bytes,
    sets_at_head,
    stage_activations,
    wide_bytes,
)
from plait.dataflow import CallKind
from plait.dataflow.made_rows import prompts_each
from plait.generation.settings import DRAFT_MODEL_TOKENS
from plait.layout.mesh import Layout
from plait.layout.params import Heads
from plait.layout.shards import gathered_elements, stage_bounds
from plait.models.lora_settings import NO_LORA
from plait.policy.blocks import BLOCK_TOKENS
from plait.recipes.engine_checks import abilities, max_draft_tokens
from plait.recipes.evaluation_sets import draws_filtered
from plait.recipes.role_models import RoleModel, is_balanced
from plait.schedule.placements import RolePlacement
from plait.schedule.plan import Mode
from plait.training.memory import BYTES

CACHE = "KV cache"
STATES = "states that layers keep"
PACKED = "weights packed for decoding"
ON_THEIR_WAY = "prompts on their way"
ACTIVATIONS = "activations"
GATHERED = "layers that are gathered"


def working_rows(rank: int, facts: Facts, model: RoleModel) -> dict[Use, Rows]:
    """What each kind of call of a role takes on a device beside parameters and optimizer state."""
    recipe, place = facts.recipe, facts.places[model.role]
    rows_by_use: dict[Use, Rows] = {}
    instance = place.instance_on(rank)
    if instance is not None and (pool := pool_of(facts, model, draws=instance not in place.prefill)) is not None:
        cached = pool.tokens * cached_bytes(rank, facts, model, instance)
        rows_by_use[model.role, "decode"] = [(f"{CACHE} ({pool})", cached)]
        if place.prefill:
            tokens = _tokens_on_their_way(facts, model.role, place, instance)
            on_their_way = tokens * cached_bytes(rank, facts, model, instance)
            rows_by_use[model.role, "decode"].append((f"{ON_THEIR_WAY} ({tokens} tokens)", on_their_way))
        shape, stage = facts.shapes[model.name], instance.coordinates(rank).pp
        if states := state_bytes(shape, recipe.dtype, pool.running, instance.parallelism)[stage]:
            rows_by_use[model.role, "decode"].append((f"{STATES} ({pool.running} samples)", states))
        contexts = min(map(first_context, _prompts_asked(facts, model.role))), pool.context
        most_new_tokens = 1 + max_draft_tokens(recipe)
        if recipe.device == "cuda":
            is_last = stage == instance.parallelism.pp - 1
            graphs = prompt_graph_bytes(shape, recipe.dtype, is_first=stage == 0)
            if pool.draws:
                graphs += graph_bytes(shape, recipe.dtype, pool.running, contexts, most_new_tokens, is_last=is_last)
            rows_by_use[model.role, "decode"].append((GRAPHS, graphs))
        if pool.draws and drafts_on(recipe, rank, instance):
            rows_by_use[model.role, "decode"] += draft_cache(recipe, facts.shapes, pool.tokens)
            if recipe.device == "cuda" and (draft := recipe.sampling.draft_model) is not None:
                graphs = graph_bytes(facts.shapes[draft], recipe.dtype, pool.running, contexts, DRAFT_MODEL_TOKENS)
                rows_by_use[model.role, "decode"].append((f"draft model: {GRAPHS}", graphs))
        if recipe.device == "cuda":
            tokens, filters = recipe.sampling.max_prefill_tokens, draws_filtered(recipe)
            drawing = pool.running if pool.draws else 0
            step = LargestStep.of(tokens, drawing, most_new_tokens, filters=filters)
            of_stages = step_bytes(shape, recipe.dtype, step, instance.parallelism)
            rows_by_use[model.role, "decode"].append((STEP, of_stages[stage]))
        if is_packed(recipe):
            packed = packed_stages(shape, recipe.dtype, recipe.lora, instance.parallelism)
            rows_by_use[model.role, "decode"].append((PACKED, packed[stage]))
    asked: tuple[tuple[Mode, Layout | None], ...] = (("train", place.train), ("score", place.score))
    for mode, layout in asked:
        if layout is not None and rank in layout.mesh.ranks:
            rows_by_use[model.role, mode] = _forward_rows(rank, facts, model, mode, layout)
    return rows_by_use


def _prompts_asked(facts: Facts, role: str) -> list[Lengths]:
    """Lengths of the prompts of each call of a role that generates."""
    return [facts.lengths_of[node.id].prompts for node in facts.flow.calls(role) if node.kind is CallKind.GENERATE]


def _tokens_on_their_way(facts: Facts, role: str, place: RolePlacement, instance: Layout) -> int:
    """Tokens of prompts that come to an instance, or leave it, at the same time at most."""
    here, there = (place.prefill, place.drawing) if instance in place.prefill else (place.drawing, place.prefill)
    recipe = facts.recipe
    sent = []
    for node in (node for node in facts.flow.calls(role) if node.kind is CallKind.GENERATE):
        count = recipe.prompts_per_step * prompts_each(facts.flow, node, recipe.samples_per_prompt)
        longest, prompts = facts.lengths_of[node.id].prompts.longest, -(-count // len(here))
        sent.append(tokens_sent(longest, prompts, recipe.sampling.max_prefill_tokens, len(there)))
    return max(sent)


def _forward_rows(rank: int, facts: Facts, model: RoleModel, mode: Mode, layout: Layout) -> Rows:
    """What a call that trains or scores takes."""
    recipe, shape, width = facts.recipe, facts.shapes[model.name], BYTES[facts.recipe.dtype]
    rows = [(ACTIVATIONS, _activations(rank, facts, model, mode, layout, fused=is_fused(recipe)))]
    if layout.shards_weights:
        at = layout.coordinates(rank)
        rooms = gathered_elements(facts.parameters[model.role], layout.parallelism, at.tp)[at.pp]
        rows.append((GATHERED, rooms * width))
    tp, sets = layout.parallelism.tp, _sets_read(facts, model, mode)
    if recipe.device == "cpu":
        batch, num_in_flight = largest_batch(facts, model, mode, layout), 1
        if mode == "train":
            num_in_flight = facts.places[model.role].in_flight(rank, batch.count)
        rows.append((SETS_READ, num_in_flight * sets.read_bytes(batch.tokens)))
    if not model.scalar and layout.coordinates(rank).pp == layout.parallelism.pp - 1:
        rows.append(("logits of one chunk", logits_bytes(shape, width, recipe.device, tp)))
        rows.append(("likeliest tokens of each place", wide_bytes(largest_batch(facts, model, mode, layout))))
        if mode == "train" and recipe.lora.rank == 0:
            rows.append(("gradient of the head", head_gradient_bytes(shape, width, tp)))
        if recipe.device != "cpu":
            rows.append((SETS_READ, sets_at_head(shape, width, tp, sets)))
    if recipe.device != "cpu" and sets.experts:
        rows.append((ROUTED, sets.routed_bytes(largest_batch(facts, model, mode, layout).tokens)))
    return [(what, count) for what, count in rows if count]


def _sets_read(facts: Facts, model: RoleModel, mode: Mode) -> KeptSets:
    """The sets of a role's calls that train or score, those of the call with most of them."""
    calls = facts.flow.calls(model.role)
    reading = [node for node in calls if (node.kind is CallKind.TRAIN if mode == "train" else reads_sets(node))]
    sets = [] if model.scalar else [facts.sets_of(node) for node in reading]
    return max(sets, key=lambda kept: (kept.tokens, kept.experts), default=NO_SETS)


def largest_batch(facts: Facts, model: RoleModel, mode: Mode, layout: Layout) -> LargestBatch:
    """The largest micro-batch of a call that trains or scores."""
    return LargestBatch.of(
        facts.recipe,
        facts.flow,
        facts.lengths,
        model.role,
        trains=mode == "train",
        dp=layout.parallelism.dp,
        pp=layout.parallelism.pp,
        budget_tokens=facts.places[model.role].micro_batch_tokens.get(mode),
    )


def micro_batch_bytes(
    facts: Facts, model: RoleModel, mode: Mode, layout: Layout, *, fused: bool
) -> tuple[Activations, ...]:
    """What the largest micro-batch takes on this rank, by the kind of layers (`layer_kinds`)."""
    recipe, shape, sizes = facts.recipe, facts.shapes[model.name], layout.parallelism
    return activations_by_kind(
        shape,
        largest_batch(facts, model, mode, layout),
        Blocks(
            BYTES[recipe.dtype],
            fused,
            checkpointed=mode == "train" and recipe.checkpoint_activations,
            tp=sizes.tp,
            splits_tokens=mode == "train" and recipe.sequence_parallel,
            by_kernel=recipe.device == "cuda",
            by_masks=recipe.device == "cuda" and mode != "train",
            balanced=mode == "train" and is_balanced(model.role, recipe),
        ),
        recipe.lora if mode == "train" else NO_LORA,
    )


def _activations(rank: int, facts: Facts, model: RoleModel, mode: Mode, layout: Layout, *, fused: bool) -> int:
    """What micro-batches of the largest size keep of this rank's layers at a time."""
    kinds, shape = micro_batch_bytes(facts, model, mode, layout, fused=fused), facts.shapes[model.name]
    counts = stage_counts(shape, layout.parallelism)[layout.coordinates(rank).pp]
    if mode != "train":
        return stage_activations(kinds, counts, shape.layers, None)
    num_in_flight = facts.places[model.role].in_flight(rank, largest_batch(facts, model, mode, layout).count)
    of_head = logits_of_stages(facts, model, layout)[layout.coordinates(rank).pp]
    return stage_activations(kinds, counts, shape.layers, num_in_flight) + num_in_flight * of_head


def logits_of_stages(facts: Facts, model: RoleModel, layout: Layout) -> tuple[int, ...]:
    """Bytes of logits of a training's largest micro-batch that stay for its backward, by stage (the last has them)."""
    recipe, sizes = facts.recipe, layout.parallelism
    kept = 0
    if not (model.scalar or recipe.checkpoint_activations):
        tokens = largest_batch(facts, model, "train", layout).tokens
        kept = kept_logits(facts.shapes[model.name], BYTES[recipe.dtype], recipe.device, tokens, sizes.tp)
    return (*(0,) * (sizes.pp - 1), kept)


def joint_rows(facts: Facts, working: Mapping[Use, Rows]) -> dict[Use, Rows]:
    """What training calls of several roles take at the same time: activations of all, and one head at work."""
    rows_by_use: dict[Use, Rows] = {}
    for role, mode in working:
        roles = facts.together(role) if mode == "train" else ()
        if len(roles) > 1:
            rows: dict[str, int] = {}
            for what, count in (row for trained in roles for row in working.get((trained, mode), ())):
                rows[what] = rows.get(what, 0) + count if what == ACTIVATIONS else max(rows.get(what, 0), count)
            rows_by_use[role, mode] = list(rows.items())
    return rows_by_use


def plain_activations(rank: int, facts: Facts) -> int:
    """Activations of the largest call, of a family whose layers are not fused where there is to be room for one."""
    bytes_by_call, fused = [0], fused_at_worst(facts.recipe.device, fused=is_fused(facts.recipe))
    for model in facts.models:
        place = facts.places[model.role]
        asked: tuple[tuple[Mode, Layout | None], ...] = (("train", place.train), ("score", place.score))
        for mode, layout in asked:
            if layout is not None and rank in layout.mesh.ranks:
                bytes_by_call.append(_activations(rank, facts, model, mode, layout, fused=fused))
    return max(bytes_by_call)


def cached_bytes(rank: int, facts: Facts, model: RoleModel, instance: Layout) -> int:
    """Keys and values of a token on a rank of an instance, and its experts where they are kept: its layers, its
    heads."""
    shape = facts.shapes[model.name]
    at, sizes = instance.coordinates(rank), instance.parallelism
    first, stop = Heads(shape.heads, shape.kv_heads, shared=True).part_range(at.tp, sizes.tp)
    bounds, stage = stage_bounds(shape.layers, sizes), at.pp
    attending = shape.attending_in(bounds[stage], bounds[stage + 1])
    cached = 2 * attending * (stop - first) * shape.head_dim * BYTES[facts.recipe.dtype]
    if not facts.recipe.sampling.router_replay:
        return cached
    return cached + routed_bytes_per_token(shape, bounds[stage], bounds[stage + 1])


@dataclass(frozen=True)
class Pool:
    """Keys and values of an instance: of the samples that it runs at a time, as long as they may be, or of the prompts
    that it computes for others."""

    running: int
    context: int
    """Tokens of a sample."""
    tokens: int
    """That there is memory for."""
    is_whole: bool
    """All of it is taken when the first prompt is computed."""
    samples: int
    """That a call of a step asks it for."""
    draws: bool = True

    def __str__(self) -> str:
        limit = f", {self.tokens} at most" if self.tokens < self.running * self.context else ""
        limit = f", a pool of {self.tokens}" if self.is_whole else limit
        return f"{self.running} {'samples' if self.draws else 'prompts'} x {self.context} tokens{limit}"


def pool_of(facts: Facts, model: RoleModel, *, draws: bool) -> Pool | None:
    """That of an instance of our ranks; None: the role generates nothing, or another program does.

    Args:
        draws: whether it draws samples; else it computes prompts for others, and may hold all that it is given.
    """
    recipe, place = facts.recipe, facts.places[model.role]
    calls = [node for node in facts.flow.calls(model.role) if node.kind is CallKind.GENERATE]
    if not calls or abilities(recipe).computes_elsewhere:
        return None
    # Prompts are dealt to instances with all of their samples.
    count, most_said = recipe.samples_per_prompt, recipe.sampling.max_response_tokens
    prompts_of = {node.id: recipe.prompts_per_step * prompts_each(facts.flow, node, count) for node in calls}
    share = lambda node: -(-prompts_of[node.id] // len(place.drawing)) * node.generation.num_samples(count)
    running = min(recipe.sampling.max_running, samples := max(map(share, calls)))
    lengths = [(facts.lengths_of[node.id].prompts, node.generation.limit(most_said)) for node in calls]
    context = max(prompts.longest + tokens for prompts, tokens in lengths)
    if not draws:
        running = -(-max(prompts_of.values()) // len(place.prefill))
        context = max(prompts.longest for prompts, _ in lengths)
    most = recipe.sampling.num_blocks(facts.shapes[model.name].max_positions) * BLOCK_TOKENS
    root = 0 if facts.shapes[model.name].recurrent else min(held_root(recipe, prompts) for prompts, _ in lengths)
    asked = asked_tokens(running, context, root)
    return Pool(running, context, pool_tokens(asked, most, recipe.device), recipe.device == "cuda", samples, draws)

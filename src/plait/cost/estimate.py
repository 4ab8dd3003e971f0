"""What a run will take, before anything is loaded: the batch arithmetic and the memory. Imports no torch by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.cost.draft_memory import draft_cache, draft_rows, draft_widened
from plait.cost.engine_memory import POOL_TOKENS
from plait.cost.generation_memory import kv_bytes_per_token, packed_bytes, pool_tokens, widened_bytes
from plait.cost.layer_kinds import layer_kinds
from plait.cost.lengths import Lengths
from plait.cost.micro_batch import LargestBatch
from plait.cost.shape_parameters import adapter_parameters
from plait.cost.working_memory import (
    Blocks,
    Expected,
    activations_by_kind,
    head_gradient_bytes,
    is_fused,
    is_packed,
    keeps_freed,
    logits_bytes,
    process_terms,
    slack_rows,
)
from plait.dataflow import CallKind, Dataflow
from plait.models.files.hub import read_config
from plait.models.lora_settings import NO_LORA
from plait.models.shape import ModelShape
from plait.policy.blocks import BLOCK_TOKENS
from plait.recipes.engine_checks import abilities
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import RoleModel
from plait.training.memory import BYTES, parameter_bytes


def model_shape(name: str) -> ModelShape:
    """The shape of a model that would be admitted, before its weights are fetched: the checks of its family are made.

    Raises:
        ModelError: the model is not found, is refused by a check (which is named), or its configuration is incomplete.
    """
    from plait.models.admission import check_config  # imports torch

    return ModelShape.from_config(check_config(read_config(name), name), name)


@dataclass(frozen=True)
class Arithmetic:
    """One step, and the run, in prompts, samples and tokens. Tokens are upper bounds."""

    prompts_per_step: int
    """Or examples, or pairs."""
    samples_per_step: int
    max_tokens_per_step: int
    steps: int

    @classmethod
    def of(cls, recipe: Recipe, flow: Dataflow, max_prompt_tokens: int) -> Arithmetic:
        prompts = recipe.prompts_per_step
        samples = tokens = 0
        for node in flow.nodes:
            if node.kind is CallKind.GENERATE:
                here = prompts * node.generation.num_samples(recipe.samples_per_prompt)
                samples += here
                tokens += prompts * max_prompt_tokens + here * recipe.sampling.max_response_tokens
            elif node.kind is CallKind.READ:
                here = prompts * (2 if node.call == "pairs" else 1)
                samples += here
                tokens += here * max_prompt_tokens
        return cls(prompts, samples, tokens, recipe.steps)


Rows = list[tuple[str, int]]
"""(what, bytes)."""


@dataclass(frozen=True)
class MemoryTable:
    """What a run on one device will hold. An estimate."""

    expected: Rows
    """Weights, optimizer state, KV cache, activations, logits, for samples as long as they may be."""
    during: Rows
    """(a call, or what else is done, all that is held then)."""
    slack: Rows
    """What may come on top: with it, an upper bound."""


def memory_table(
    recipe: Recipe,
    flow: Dataflow,
    models: Sequence[RoleModel],
    shapes: Mapping[str, ModelShape],
    longest_texts: Lengths,
) -> MemoryTable:
    """The memory of a run on one device.

    Args:
        models: which model each role begins as.
        longest_texts: of the prompts; where nothing is generated, of the given samples.
    """
    held = _adapted_rows(recipe, models, shapes) if recipe.lora.rank > 0 else _whole_rows(recipe, models, shapes)
    shape, width = shapes[recipe.model], BYTES[recipe.dtype]
    cache: Rows = []
    if flow.of_kind(CallKind.GENERATE):
        cache = _cache_rows(recipe, shapes, longest_texts)
        held += draft_rows(recipe, shapes)
    largest = {
        fused: _largest_activations(recipe, flow, models, shapes, longest_texts, fused) for fused in (True, False)
    }
    activations, tokens = largest[is_fused(recipe)]
    forward = [(f"activations ({tokens} tokens)", activations)]
    if any(not model.scalar for model in models):
        forward.append(("logits of one chunk", logits_bytes(shape, width, recipe.device)))
    if any(model.trained and not model.scalar for model in models) and recipe.lora.rank == 0:
        forward.append(("gradient of the head", head_gradient_bytes(shape, width)))
    rows, packed, left = [*cache, *forward], 0, activations if keeps_freed(recipe.device) else 0
    can = abilities(recipe)
    is_elsewhere = bool(cache) and can.computes_elsewhere
    if is_elsewhere:
        rows.append((f"weights in {can.program}'s process", shape.parameters * width))
    elif cache and is_packed(recipe):
        # The copy is given back before anything is trained or scored: what of that goes back, too, makes room for it.
        packed, others = packed_bytes(shape, recipe.dtype, recipe.lora), sum(size for _, size in forward) - left
        if packed > others:
            rows.append(("weights packed for decoding, beyond what else is large for a moment", packed - others))
    process = process_terms(recipe.device, 1)
    read = sum(process.values()) + sum(size for _, size in held)
    during: Rows = [("reading models", read)]
    generation = read + sum(size for _, size in cache) + packed + left
    if is_elsewhere:
        during.append(("all calls", read + sum(size for _, size in rows)))
    else:
        during += [("generation", generation)] if cache else []
        during.append(("scoring and training", read + sum(size for _, size in forward)))
    most = max(size for _, size in during)
    slack = slack_rows(
        recipe.device,
        Expected(
            activations=activations,
            plain=largest[False][0],
            weights=max((shapes[model.name].parameters * width for model in models), default=0),
            working=most - read,
            widened=max(0, generation + widened_bytes(packed, recipe.dtype) - most)
            + (draft_widened(recipe, shapes) if cache else 0),
        ),
    )
    return MemoryTable([*process.items(), *held, *rows], during, slack)


def _cache_rows(recipe: Recipe, shapes: Mapping[str, ModelShape], longest_texts: Lengths) -> Rows:
    """Keys and values of the model that generates, and of one that guesses."""
    shape = shapes[recipe.model]
    running = min(recipe.sampling.max_running, recipe.prompts_per_step * recipe.samples_per_prompt)
    context = longest_texts.longest + recipe.sampling.max_response_tokens
    pool = recipe.sampling.num_blocks(shape.max_positions) * BLOCK_TOKENS
    kept = pool_tokens(running, context, pool, recipe.device)
    is_fixed = abilities(recipe).computes_elsewhere
    if is_fixed:
        kept = POOL_TOKENS[recipe.sampling.engine](recipe, shape)
    limit = f", {kept} at most" if kept < running * context else ""
    limit = f", a pool of {kept}" if recipe.device == "cuda" or is_fixed else limit
    kv_bytes = kept * kv_bytes_per_token(shape, recipe.dtype)
    rows = [(f"KV cache ({running} samples x {context} tokens{limit})", kv_bytes)]
    return rows + draft_cache(recipe, shapes, kept)


def _largest_activations(
    recipe: Recipe,
    flow: Dataflow,
    models: Sequence[RoleModel],
    shapes: Mapping[str, ModelShape],
    longest_texts: Lengths,
    fused: bool,
) -> tuple[int, int]:
    """Bytes, and the tokens that they are of: roles compute one after the other, and what one has freed the next takes.
    A score keeps one layer's, of the widest kind."""
    width, sizes = BYTES[recipe.dtype], [(0, 0)]
    for model in models:
        shape, asked = shapes[model.name], {node.kind for node in flow.calls(model.role)}
        for kind in asked & {CallKind.TRAIN, CallKind.SCORE}:
            trains = kind is CallKind.TRAIN
            batch = LargestBatch.of(recipe, flow, longest_texts, model.role, trains=trains)
            again = recipe.checkpoint_activations and trains
            lora = recipe.lora if trains and model.trained else NO_LORA
            kinds = activations_by_kind(shape, batch, Blocks(width, fused, checkpointed=again), lora)
            counts = [len(kind.layers) for kind in layer_kinds(shape)]
            kept = [one.kept for one in kinds]
            of_all = sum(count * num_bytes for count, num_bytes in zip(counts, kept, strict=True)) // shape.layers
            of_all += max(one.again for one in kinds)
            sizes.append((of_all if trains else max(kept) // shape.layers, batch.tokens))
    return max(sizes)


def _whole_rows(recipe: Recipe, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape]) -> list[tuple[str, int]]:
    """Each trained role has weights of its own; frozen ones that begin as the same share theirs."""
    rows: list[tuple[str, int]] = []
    frozen: dict[tuple[str, bool, bool], list[str]] = {}
    for model in models:
        followed = any(other.follows == model.role for other in models)
        per = parameter_bytes(recipe.dtype, trained=model.trained, followed=followed)
        count = shapes[model.name].parameters
        if model.trained:
            rows.append((f"{model.role}: weights ({recipe.dtype})", count * per.weights))
            rest = per.total - per.weights
            rows.append((f"{model.role}: masters, moments and gradients", count * rest))
        else:
            frozen.setdefault((model.name, model.scalar, model.changes), []).append(model.role)
    for (name, _, _), roles in frozen.items():
        per = parameter_bytes(recipe.dtype, trained=False)
        rows.append((f"{', '.join(roles)}: weights ({recipe.dtype})", shapes[name].parameters * per.weights))
    return rows


def _adapted_rows(
    recipe: Recipe, models: Sequence[RoleModel], shapes: Mapping[str, ModelShape]
) -> list[tuple[str, int]]:
    """Roles that begin as the same checkpoint share its weights; trained ones have an adapter each."""
    rows: list[tuple[str, int]] = []
    shared: dict[tuple[str, bool], list[str]] = {}
    for model in models:
        shared.setdefault((model.name, model.has_head), []).append(model.role)
    for (name, _), roles in shared.items():
        rows.append((f"{', '.join(roles)}: weights ({recipe.dtype})", shapes[name].parameters * BYTES[recipe.dtype]))
    for model in models:
        if model.trained:
            per = parameter_bytes(recipe.dtype, trained=True)
            count = adapter_parameters(shapes[model.name], recipe.lora)
            rows.append((f"{model.role}: adapter, its masters, moments and gradients", count * per.total))
    return rows


def human_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

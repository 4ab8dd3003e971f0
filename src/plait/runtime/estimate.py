"""What a run will take, before anything is loaded: the batch arithmetic and the memory. Imports no torch by itself."""

from __future__ import annotations

from dataclasses import dataclass

from plait.dataflow import CallKind, Dataflow
from plait.models.hub import read_config
from plait.models.shape import HEAD_CHUNK_ROWS, ModelShape
from plait.runtime.recipe import Recipe
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
    """One step, and the run, in prompts, samples, tokens and optimizer steps. Tokens are upper bounds."""

    prompts_per_step: int
    samples_per_step: int
    max_tokens_per_step: int
    optimizer_steps_per_step: int
    steps: int

    @classmethod
    def of(cls, recipe: Recipe, flow: Dataflow, max_prompt_tokens: int) -> Arithmetic:
        prompts = recipe.prompts_per_step
        samples = tokens = 0
        for node in flow.nodes:
            if node.kind is CallKind.GENERATE:
                here = prompts * (node.options["samples_per_prompt"] or recipe.samples_per_prompt)
                samples += here
                tokens += prompts * max_prompt_tokens + here * recipe.sampling.max_response_tokens
        updates = sum(flow.optimizer_steps(role) for role in flow.roles)
        return cls(prompts, samples, tokens, updates, recipe.steps)


def memory_table(recipe: Recipe, flow: Dataflow, shape: ModelShape, max_prompt_tokens: int) -> list[tuple[str, int]]:
    """(what, bytes) of one device: weights, optimizer state, KV cache, activations, logits. An estimate."""
    width = BYTES[recipe.dtype]
    count = shape.parameters
    rows: list[tuple[str, int]] = []
    trained = {node.role for node in flow.nodes if node.kind is CallKind.TRAIN}
    scored = {node.role for node in flow.nodes if node.outputs and node.outputs[0].level == "token"}
    for role in flow.roles:
        if role not in trained | scored:
            continue
        per = parameter_bytes(recipe.dtype, trained=role in trained)
        rows.append((f"{role}: weights ({recipe.dtype})", count * per.weights))
        if role in trained:
            rest = per.masters + per.moments + per.gradients
            rows.append((f"{role}: masters, moments and gradients", count * rest))
    running = min(recipe.sampling.max_running, recipe.prompts_per_step * recipe.samples_per_prompt)
    context = max_prompt_tokens + recipe.sampling.max_response_tokens
    kv_per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * width
    rows.append((f"KV cache ({running} samples x {context} tokens)", running * context * kv_per_token))
    rows.append((f"activations ({recipe.micro_batch_tokens} tokens)", _activation_bytes(recipe, shape, width)))
    rows.append(("logits of one chunk", 3 * HEAD_CHUNK_ROWS * shape.vocabulary * 4))
    return rows


def _activation_bytes(recipe: Recipe, shape: ModelShape, width: int) -> int:
    """Tensors that one block keeps for its backward: two norms (in and float32 copy), q, k, v, attention and its
    output, gate, up, their product, the residual."""
    kv = shape.kv_heads * shape.head_dim
    kept = width * (6 * shape.hidden + 2 * shape.heads * shape.head_dim + 2 * kv + 4 * shape.active_intermediate)
    kept += 4 * 2 * shape.hidden
    blocks = 1 if recipe.checkpoint_activations else shape.layers
    inputs = shape.layers * shape.hidden * width if recipe.checkpoint_activations else 0
    return recipe.micro_batch_tokens * (kept * blocks + inputs)


def human_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

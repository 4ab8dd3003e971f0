"""What a run will do, before anything is loaded: the batch arithmetic, and the shapes of models. Imports no torch by
itself."""

from __future__ import annotations

from dataclasses import dataclass

from plait.cost.call_lengths import lengths_by_call
from plait.cost.lengths import SampleLengths
from plait.dataflow import CallKind, Dataflow
from plait.dataflow.made_rows import prompts_each, samples_of_prompt
from plait.models.files.hub import is_stated, read_config
from plait.models.shape import ModelShape
from plait.recipes.recipe import Recipe

Rows = list[tuple[str, int]]
"""(what, bytes)."""


def model_shape(name: str) -> ModelShape:
    """The shape of a model that would be admitted, before its weights are fetched: the checks of its family are made,
    and as much of the self-check as needs no weights.
    Those of models whose configuration plait states pass by a test, and are not made again.

    Raises:
        ModelError: the model is not found, is refused by a check (which is named), or its configuration is incomplete.
    """
    config = read_config(name)
    if is_stated(name):
        return ModelShape.from_config(config, name)
    from plait.models.foreseen import check_foreseen  # imports torch and transformers, which takes seconds

    return ModelShape.from_config(check_foreseen(config, name), name)


@dataclass(frozen=True)
class Arithmetic:
    """One step, and the run, in prompts, samples and tokens. Tokens are upper bounds."""

    prompts_per_step: int
    """Or examples, or pairs."""
    samples_per_step: int
    max_tokens_per_step: int
    steps: int

    @classmethod
    def of(cls, recipe: Recipe, flow: Dataflow, lengths: SampleLengths) -> Arithmetic:
        samples = tokens = 0
        count = recipe.samples_per_prompt
        lengths_of = lengths_by_call(flow, lengths, count)
        for node in (node for node in flow.nodes if node.kind in (CallKind.GENERATE, CallKind.READ)):
            prompts = recipe.prompts_per_step * prompts_each(flow, node, count)
            here = prompts * samples_of_prompt(node, count)
            samples += here
            if node.kind is CallKind.GENERATE:
                most = node.generation.limit(recipe.sampling.max_response_tokens)
                tokens += prompts * lengths_of[node.id].prompts.longest + here * most
            else:
                tokens += here * lengths_of[node.id].longest
        return cls(recipe.prompts_per_step, samples, tokens, recipe.steps)


def human_bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

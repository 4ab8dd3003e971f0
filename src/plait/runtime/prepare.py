"""What can be checked and resolved before any work: recipe, flow, data, rewards, lengths. Loads no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.data.prompts import PromptSet, PromptStream, evaluation_prompts, prompt_set
from plait.data.records import Prompt
from plait.data.sources import Splits, open_splits
from plait.dataflow import CallKind, Dataflow
from plait.errors import ConfigError, FlowError, ModelError
from plait.models.hub import resolve
from plait.rewards.functions import RewardFunction, functions_of
from plait.runtime.algorithm import load_flow, trace_algorithm
from plait.runtime.estimate import ModelShape, model_shape
from plait.runtime.recipe import Recipe

MODEL_ROLES = ("actor", "ref")
FUNCTION_ROLES = ("reward",)

_CALLS = {
    "actor": {"generate", "logprobs", "train"},
    "ref": {"logprobs", "generate"},
    "reward": {"score"},
}


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    recipe: Recipe
    flow: Dataflow
    shape: ModelShape
    tokenizer: Any
    functions: tuple[RewardFunction, ...]
    splits: Splits
    train_set: PromptSet
    held_out: tuple[Prompt, ...]

    def stream(self) -> PromptStream:
        recipe = self.recipe
        return PromptStream(
            self.train_set, seed=recipe.seed, prompts_per_step=recipe.prompts_per_step, shuffle=recipe.data.shuffle
        )


def prepare(recipe: Recipe, *, flow: Callable[..., Any] | None = None) -> Prepared:
    """Resolve a recipe.

    Args:
        flow: the function that `recipe.algorithm` names, where it is at hand.

    Raises:
        UserError: a key, the flow, the data or the model cannot be used; the message names the key and the remedy.
    """
    check_sampling(recipe)
    check_device(recipe)
    algorithm = flow or load_flow(recipe.algorithm)
    dataflow = trace_algorithm(algorithm, recipe.options, (*MODEL_ROLES, *FUNCTION_ROLES))
    check_calls(dataflow)
    functions = functions_of(recipe.reward, task=recipe.data.task)
    shape = model_shape(recipe.model)
    splits = open_splits(recipe.data, recipe.evaluation.items)
    tokenizer = load_tokenizer(recipe.model)
    limit = prompt_limit(recipe, shape)
    train_set = prompt_set(splits.train, tokenizer, recipe.data, limit)
    held_out: tuple[Prompt, ...] = ()
    if splits.evaluation is not None:
        held_out = tuple(evaluation_prompts(prompt_set(splits.evaluation, tokenizer, recipe.data, limit)))
    return Prepared(recipe, dataflow, shape, tokenizer, functions, splits, train_set, held_out)


def prompt_limit(recipe: Recipe, shape: ModelShape) -> int:
    """Most tokens that a prompt may have: `data.max_prompt_tokens`, within what the model's positions leave.

    Raises:
        ConfigError: prompt and response together do not fit the model.
    """
    room = shape.max_positions - recipe.sampling.max_response_tokens
    asked = recipe.data.max_prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        raise ConfigError(
            f"`data.max_prompt_tokens` ({asked or 1}) + `sampling.max_response_tokens` "
            f"({recipe.sampling.max_response_tokens}) exceed the {shape.max_positions} positions of `{recipe.model}`; "
            "lower one of them"
        )
    return asked or room


def check_sampling(recipe: Recipe) -> None:
    """Training needs log-probs over the support that was sampled from, so truncated sampling is refused.

    Raises:
        ConfigError: temperature 0, top_p or top_k in a training recipe.
    """
    sampling = recipe.sampling
    if sampling.temperature == 0:
        raise ConfigError(
            "`sampling.temperature` is 0: every sample of a group would be the same; give a value above 0"
        )
    for key, value, off in (("top_p", sampling.top_p, 1.0), ("top_k", sampling.top_k, 0)):
        if value != off:
            raise ConfigError(
                f"`sampling.{key}` is {value}: training on a truncated distribution biases the probability ratio "
                f"(log-probs are those of the whole vocabulary); set it to {off:g}, or use it in `plait generate` only"
            )


def check_device(recipe: Recipe) -> None:
    """Raises ConfigError where `device` is not to be had."""
    if recipe.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("`device` is cuda, but torch finds no CUDA device; set it to cpu")


def check_calls(flow: Dataflow) -> None:
    """Raises FlowError where a role is asked for what it cannot do, or nothing is trained."""
    for node in flow.nodes:
        if node.kind is CallKind.COMPUTE or node.role is None:
            continue
        call = node.call.split("#")[0].removeprefix(f"{node.role}.")
        if call not in _CALLS[node.role]:
            can = ", ".join(sorted(_CALLS[node.role]))
            raise FlowError(f"flow `{flow.name}`: role `{node.role}` cannot `{call}`; it can {can}")
    if not any(node.kind is CallKind.TRAIN for node in flow.nodes):
        raise FlowError(f"flow `{flow.name}` trains nothing; give it a call `actor.train(samples, loss=…)`")


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model name, without its weights.

    Raises:
        ModelError: the model cannot be found, or its folder has no tokenizer.
    """
    from transformers import AutoTokenizer

    folder = resolve(model)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"key `model`: `{model}` has no tokenizer that can be read: {error}") from error


def recipe_text(recipe: Recipe) -> str:
    """The resolved recipe as YAML, as the run directory keeps it."""
    import yaml

    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def changed_keys(old: Path, new: Recipe) -> list[str]:
    """Dotted keys in which a stored recipe differs from `new`."""
    import yaml

    def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {prefix.rstrip("."): tree}
        return {key: value for name, child in tree.items() for key, value in flat(child, f"{prefix}{name}.").items()}

    before, after = flat(yaml.safe_load(old.read_text())), flat(new.model_dump(mode="json"))
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))

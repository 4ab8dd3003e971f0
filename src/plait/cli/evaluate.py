"""`plait eval RECIPE [--model M] [--json] [--key value …]`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from plait.cli import train
from plait.cli.help import Option
from plait.cli.opening import opening, title_of
from plait.errors import ConfigError
from plait.observe.screen import say

if TYPE_CHECKING:
    from plait.data.settings import DataSettings
    from plait.recipes.evaluation_sets import EvaluationSet
    from plait.recipes.recipe import Recipe
    from plait.runtime.evaluating.evaluation import Evaluation

FLAGS = {"--json": "print the figures as JSON", **train.TRUST}

_EVALUATION = tuple(
    f"--evaluation.{name}"
    for name in (
        *("items", "sets", "temperature", "top_p", "top_k", "min_p", "max_response_tokens"),
        *("samples_per_prompt", "pass_at", "functions", "answer"),
    )
)
_KEYS = ("--model", *_EVALUATION, "--seed", "--dtype", "--device", "--devices", "--threads")
_SAMPLING = (
    "max_response_tokens",
    "stop",
    "stop_token_ids",
    "max_running",
    "max_prefill_tokens",
    "kv_tokens",
    "kv_memory",
    "prefix_cache_tokens",
    "exact",
)


def evaluate(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Answer a recipe's held-out items as its evaluations do: greedily, or at `evaluation.temperature`.

    The items are those that training with the same recipe never sees. Of a recipe that learns from given samples,
    the loss on held-out ones is measured.
    """
    path, overrides, flags = train.read_recipe("eval", tokens, FLAGS)

    from plait.recipes.evaluation_sets import evaluation_sets
    from plait.recipes.trust import user_recipe

    recipe = without_training(user_recipe(path, overrides, trust_run_code="--trust-run-code" in flags))
    recipe = with_reference(recipe, path, overrides)
    if not evaluation_sets(recipe):
        raise ConfigError("`evaluation.items` is 0: set how many held-out items to answer (--evaluation.items 100)")
    train.check_inputs(train.check_flow(recipe.letting_be(), trains=False), recipe)
    with opening(title_of("eval", path), opening_facts(recipe)):
        from plait.cli.evaluation_report import set_text
        from plait.runtime.api import evaluate_model

        result = evaluate_model(recipe)
    metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics().items()}
    if "--json" in flags:
        say(json.dumps({"items": result.num_items, **metrics}, allow_nan=False))
        return 0
    for place, of_set in enumerate(evaluation_sets(recipe)):
        of_items = result[of_set.label]
        say(f"{chr(10) if place else ''}{set_text(recipe, of_set, of_items)}, model {recipe.model}")
        _say_of_set(of_items)
    return 0


def _say_of_set(result: Evaluation) -> None:
    """The figures of a set."""
    from plait.cli.evaluation_report import told_parts

    metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics().items()}
    if not result.samples:
        for name, value in metrics.items():
            say(f"{name.removeprefix('eval/'):30}  {_figure(value)}")
        return
    if result.task is not None:
        say(f"exact accuracy                  {result.task.exact or '-'}")
        say(f"well-formed answers             {result.task.well_formed or '-'}")
        say(f"accuracy among the well-formed  {result.task.exact_among_well_formed or '-'}")
    for k in result.pass_at if result.tells_right else ():
        say(f"{f'pass@{k}':30}  {result.pass_at_k(k) or '-'}")
    for name, scores in (("reward", result.rewards), *result.further.items()):
        if scores and not result.is_accuracy(scores):
            say(f"{f'mean {name}':30}  {_figure(metrics[f'eval/{name}'])}")
    for name in told_parts(result):
        say(f"{f'mean {name}':30}  {_figure(metrics[f'eval/{name}/mean'])}")
    if not result.is_scored:
        say(f"{'mean response length':30}  {metrics['eval/response_length']:.1f}")
    if metrics.get("eval/dropped"):
        say(f"items without a score           {metrics['eval/dropped']:.0f}, left out")
    for source, of_source in result.by_source().items():
        value = of_source.task.exact if of_source.task is not None else _figure(metrics.get(f"eval/{source}/reward"))
        say(f"{f'{source}, {of_source.num_items} items':30}  {value}")


def opening_facts(recipe: Recipe) -> dict[str, str]:
    """What will be measured, in the words of the recipe."""
    from plait.data.settings import in_short
    from plait.recipes.evaluation_sets import evaluation_sets

    sets = evaluation_sets(recipe)
    several = [f"{recipe.devices} processes"] if recipe.devices > 1 else []
    return {
        "model": recipe.model,
        "data": in_short([source.source for one in sets for source in _sources_of(one, recipe)]),
        "items": ", ".join(_items_text(one, recipe) for one in sets),
        "device": ", ".join([recipe.device, *several, recipe.dtype.value]),
    }


def _sources_of(of_set: EvaluationSet, recipe: Recipe) -> tuple[DataSettings, ...]:
    return recipe.data.sources if of_set.source is None else (of_set.source,)


def _items_text(of_set: EvaluationSet, recipe: Recipe) -> str:
    """How many items a set has, in words."""
    count = len(_sources_of(of_set, recipe))
    of_each = f" of each of {count} sources" if count > 1 else ""
    return f"{of_set.label} {of_set.items or 'all'}{of_each}".lstrip()


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def without_training(recipe: Recipe) -> Recipe:
    """The recipe without what it says about drawing samples to train on, some of which is refused where one trains, and
    without adapters to train: a model has those that it comes with."""
    from plait.models.lora_settings import LoraSettings

    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "engine": "plait", "router_replay": False}
    settings = recipe.sampling.model_copy(update=plain)
    return recipe.model_copy(update={"sampling": settings, "lora": LoraSettings()})


def with_reference(recipe: Recipe, path: Path | None, overrides: Sequence[tuple[str, Any]]) -> Recipe:
    """The recipe of a flow that compares given samples with the reference, in which what `--model` gives is compared
    with what training began with, which the recipe names, and not with itself. Other recipes stay as they are."""
    from plait.dataflow import CallKind
    from plait.recipes.flow_checks import checked_flow
    from plait.recipes.recipe_file import load_recipe

    others = [(key, value) for key, value in overrides if key != "model"]
    if path is None or len(others) == len(overrides) or recipe.reference.model is not None:
        return recipe
    flow = checked_flow(recipe.letting_be())
    if "ref" not in flow.roles or flow.of_kind(CallKind.GENERATE):
        return recipe
    begun = load_recipe(path, others).model
    return recipe.model_copy(update={"reference": recipe.reference.model_copy(update={"model": begun})})


def options() -> Iterator[Option]:
    """Flags, and the keys of a recipe that an evaluation reads; it takes the others too."""
    for flag, text in FLAGS.items():
        yield Option(flag, "", text)
    chosen = (*_KEYS, *(f"--sampling.{name}" for name in _SAMPLING))
    for option in train.options():
        if option.name in chosen or option.name.startswith(("--data.", "--reward.", "--cost.")):
            yield replace(option, default="the recipe's") if option.default == "required" else option

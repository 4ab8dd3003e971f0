"""What can be checked and resolved before any work: recipe, flow, data, rewards, lengths. Loads no weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from plait.cost.estimate import ModelShape, model_shape
from plait.cost.placement import resolve_plan
from plait.data.examples import ExampleSet, ExampleStream, Given, evaluation_samples, example_set
from plait.data.formats import RowKind
from plait.data.mixture import Mixed
from plait.data.prompts import EVALUATION_UID, PromptSet, PromptStream, evaluation_prompts, prompt_set
from plait.data.records import Prompt
from plait.data.settings import DataSettings
from plait.data.sources import open_sources
from plait.dataflow import CallKind, Dataflow
from plait.errors import ConfigError, ModelError
from plait.models.files.adapter_folder import adapter_of
from plait.models.files.hub import resolve
from plait.models.files.pretrained import tokenizer_of
from plait.observe.loading import loading
from plait.policy.blocks import BLOCK_TOKENS
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.checks import (
    check_adapters,
    check_calls,
    check_device,
    check_models,
    check_rewards,
    check_sampling,
    check_trained_steps,
    check_unused,
    prompt_limit,
)
from plait.recipes.recipe import Recipe
from plait.recipes.recipe_file import load_recipe, read_tree
from plait.recipes.role_models import MODEL_ROLES, REWARD_ROLES, RoleModel, ToCome, role_models
from plait.rewards.functions import RewardFunction, functions_of, reward_functions
from plait.runtime.feed import Feed
from plait.schedule.plan import Plan


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to start."""

    recipe: Recipe
    """Its length in `steps`, whichever way the user said it."""
    flow: Dataflow
    models: tuple[RoleModel, ...]
    """Which model each role begins as."""
    shapes: Mapping[str, ModelShape]
    """By the model's name in the recipe."""
    plan: Plan
    """Where every call of a model runs."""
    tokenizer: Any
    functions: Mapping[str, tuple[RewardFunction, ...]]
    """Reward role → its functions."""
    judges: tuple[RewardFunction, ...]
    columns: tuple[str, ...]
    """Of the data, which reward functions may ask for."""
    train_set: Mixed[PromptSet] | None
    """None for a flow that does not generate."""
    given: Mapping[str, Mixed[ExampleSet]]
    """`examples` and `pairs`, where the flow reads them."""
    held_out: tuple[Prompt, ...]
    held_out_given: Mapping[str, tuple[Given, ...]]
    """Examples or pairs of a flow that does not generate."""

    @property
    def shape(self) -> ModelShape:
        """Of the run's own model."""
        return self.shapes[self.recipe.model]

    @property
    def num_held_out(self) -> int:
        """Items of an evaluation: prompts, examples, or pairs."""
        samples = next(iter(self.held_out_given.values()), ())
        return len(self.held_out) or len({one.sample.prompt.uid for one in samples})

    @property
    def longest_tokens(self) -> int:
        """Of the prompts; without any, of the given samples with their prompts."""
        if self.train_set is not None:
            return self.train_set.longest_tokens
        return max(examples.longest_tokens for examples in self.given.values())

    def feed(self, drawn: int = 0) -> Feed:
        """The data of the run, from the `drawn`-th prompt on."""
        recipe, count = self.recipe, self.recipe.prompts_per_step
        prompts = None
        if self.train_set is not None:
            prompts = PromptStream(self.train_set, seed=recipe.seed, prompts_per_step=count)
        streams = {
            name: ExampleStream(examples, seed=recipe.seed, per_step=count) for name, examples in self.given.items()
        }
        return Feed(prompts, streams, count, drawn, seed=recipe.seed)


def prepare(
    recipe: Recipe,
    *,
    flow: Callable[..., Any] | None = None,
    to_come: Mapping[str, ToCome] | None = None,
    trains: bool = True,
) -> Prepared:
    """Resolve a recipe.

    Args:
        flow: the function that `recipe.algorithm` names, where it is at hand.
        to_come: key of the recipe → the model that an earlier stage will put there; until then one of its shape stands
            there.
        trains: False where the model is only measured: it may then be an adapter alone.

    Raises:
        UserError: a key, the flow, the data or the model cannot be used; the message names the key and the remedy.
    """
    check_device(recipe)
    algorithm = flow or load_flow(recipe.algorithm)
    dataflow = trace_algorithm(algorithm, recipe.options, (*MODEL_ROLES, *REWARD_ROLES))
    check_calls(dataflow)
    generates = bool(dataflow.of_kind(CallKind.GENERATE))
    if generates:
        check_sampling(recipe)
    check_unused(dataflow, recipe)
    check_rewards(dataflow, recipe, has_task=recipe.data.task is not None)
    functions = {role: found for role in REWARD_ROLES if (found := _functions(role, dataflow, recipe))}
    judges = reward_functions(recipe.evaluation.functions) if recipe.evaluation.functions else ()
    if recipe.epochs is None:
        check_trained_steps(dataflow, recipe)
    models = role_models(dataflow, recipe)
    check_adapters(models, trains=trains)
    shapes = _shapes(models, recipe)
    if generates and recipe.sampling.kv_tokens is None:
        recipe = _with_pool(recipe, recipe.sampling.num_blocks(shapes[recipe.model].max_positions) * BLOCK_TOKENS)
    check_models(models, to_come or {})
    plan = resolve_plan(recipe, dataflow, models, shapes)
    _check_stop(recipe, shapes[recipe.model])
    tokenizer = load_tokenizer(recipe.model)
    _check_tokens(models, tokenizer, recipe)
    data = _read(dataflow, recipe, tokenizer, shapes[recipe.model])
    check_ids(tokenizer, shapes[recipe.model].vocabulary, _ids_of(data.train_set, data.given), recipe.model)
    if recipe.epochs is not None:
        num_rows = len(next(iter(data.given.values())) if data.train_set is None else data.train_set)
        recipe = recipe.model_copy(update={"steps": recipe.steps_of(num_rows), "epochs": None})
        check_trained_steps(dataflow, recipe)
    return Prepared(
        recipe,
        dataflow,
        models,
        shapes,
        plan,
        tokenizer,
        functions,
        judges,
        data.columns,
        data.train_set,
        data.given,
        data.held_out,
        data.held_out_given,
    )


class _Data(NamedTuple):
    """As in `Prepared`."""

    columns: tuple[str, ...]
    train_set: Mixed[PromptSet] | None
    given: dict[str, Mixed[ExampleSet]]
    held_out: tuple[Prompt, ...]
    held_out_given: dict[str, tuple[Given, ...]]


def _read(dataflow: Dataflow, recipe: Recipe, tokenizer: Any, shape: ModelShape) -> _Data:
    """What a run trains and is measured on."""
    generates = bool(dataflow.of_kind(CallKind.GENERATE))
    given_names = tuple(node.call for node in dataflow.of_kind(CallKind.READ))
    if not generates and len(given_names) > 1:
        raise ConfigError(f"the flow `{dataflow.name}` reads {' and '.join(given_names)}; one of them is its data")
    train_set, held_out, columns = None, (), ()
    if generates:
        train_set, held_out, columns = _prompts(recipe, tokenizer, prompt_limit(recipe, shape))
    given: dict[str, Mixed[ExampleSet]] = {}
    held_out_given: dict[str, tuple[Given, ...]] = {}
    for name in given_names:
        given[name], items = _given(name, generates, recipe, tokenizer, shape.max_positions)
        if items and not generates:
            held_out_given[name] = items
    return _Data(columns, train_set, given, held_out, held_out_given)


def _ids_of(
    train_set: Mixed[PromptSet] | None, given: Mapping[str, Mixed[ExampleSet]]
) -> Iterator[tuple[str, Sequence[int]]]:
    """(place, token ids) of all that is read; nothing is encoded before it is asked for."""
    for prompts in () if train_set is None else train_set.sets:
        for index, row in enumerate(prompts.kept):
            yield prompts.source[row].place, prompts.prompt(index, index).token_ids
    for examples in (one for mixed in given.values() for one in mixed.sets):
        for index, row in enumerate(examples.kept):
            for sample, _ in examples.given(index, index):
                yield examples.source[row].place, (*sample.prompt.token_ids, *sample.token_ids)


def _with_pool(recipe: Recipe, kv_tokens: int) -> Recipe:
    return recipe.model_copy(update={"sampling": recipe.sampling.model_copy(update={"kv_tokens": kv_tokens})})


def _shapes(models: tuple[RoleModel, ...], recipe: Recipe) -> dict[str, ModelShape]:
    """By the model's name.

    Raises:
        ModelError: a model cannot be used; the message begins with its key.
    """
    shapes: dict[str, ModelShape] = {}
    for key, name in (("model", recipe.model), *((one.key, one.name) for one in models)):
        if name not in shapes:
            try:
                shapes[name] = model_shape(name)
            except ModelError as error:
                raise ModelError(str(error) if key == "model" else f"key `{key}`: {error}") from error
    return shapes


def _check_stop(recipe: Recipe, shape: ModelShape) -> None:
    """Raises ConfigError where a stop token is none of the model's."""
    for token in recipe.sampling.stop_token_ids or ():
        if token >= shape.vocabulary:
            raise ConfigError(
                f"`sampling.stop_token_ids` holds {token}, but `{recipe.model}` has the tokens 0 to "
                f"{shape.vocabulary - 1}; give one of these"
            )


def check_ids(tokenizer: Any, vocabulary: int, ids: Iterable[tuple[str, Sequence[int]]], name: str) -> None:
    """Raises ModelError where a tokenizer writes tokens that its model has no embedding for.

    Args:
        ids: (place, token ids) of the texts that are read.
        name: of the model, for messages.
    """
    if max(tokenizer.get_vocab().values(), default=0) < vocabulary:
        return  # whatever the text
    for place, tokens in ids:
        if max(tokens, default=0) >= vocabulary:
            raise ModelError(
                f"model: the tokenizer of {name!r} writes token {max(tokens)} for {place}, but the model has only "
                f"{vocabulary}; give the model its own tokenizer, or set `model` to another."
            )


def _check_tokens(models: tuple[RoleModel, ...], tokenizer: Any, recipe: Recipe) -> None:
    """Raises ConfigError where a role reads the run's token ids, but begins as a model for which they mean other texts.

    A frozen reward model has its own tokens: samples are rendered for it.
    """
    ids = tokenizer.get_vocab()
    for one in models:
        if one.name == recipe.model or (one.role in REWARD_ROLES and not one.trained):
            continue
        others = load_tokenizer(one.name, one.key).get_vocab()
        unlike = [token for token, place in ids.items() if others.get(token) != place]
        if unlike:
            remedy = f"give another `{one.key}`"
            if one.role not in REWARD_ROLES and one.key != f"{one.role}.model":
                remedy = f"set `{one.role}.model`, such as to `{recipe.model}` (it gets a new head)"
            raise ConfigError(
                f"the {one.role} begins as `{one.name}` (key `{one.key}`) and reads the tokens of `{recipe.model}`, "
                f"but {len(unlike)} of these, such as {unlike[0]!r}, have another id there or none; {remedy}"
            )


def _functions(role: str, flow: Dataflow, recipe: Recipe) -> tuple[RewardFunction, ...]:
    """The functions that fill a reward role; none where the flow does not score by it, or a model alone does."""
    settings = recipe.reward if role == "reward" else recipe.cost
    if "score" not in flow.call_kinds(role) or (settings.model is not None and not settings.functions):
        return ()
    return functions_of(settings, task=recipe.data.task)


def _prompts(
    recipe: Recipe, tokenizer: Any, limit: int
) -> tuple[Mixed[PromptSet], tuple[Prompt, ...], tuple[str, ...]]:
    """(training prompts, held-out ones, columns of the data)."""
    loading(f"data {recipe.data.title}")
    sets: list[PromptSet] = []
    held_out: list[Prompt] = []
    columns: tuple[str, ...] = ()
    opened = open_sources(recipe.data, recipe.evaluation.items)
    for settings, splits in zip(recipe.data.sources, opened, strict=True):
        sets.append(prompt_set(splits.train, tokenizer, settings, limit))
        columns = splits.train.columns
        if splits.evaluation is not None:
            asked = prompt_set(splits.evaluation, tokenizer, settings, limit)
            held_out += evaluation_prompts(asked, EVALUATION_UID + len(held_out))
    return _mixed(recipe.data, sets), tuple(held_out), columns


def _given(
    name: str, generates: bool, recipe: Recipe, tokenizer: Any, positions: int
) -> tuple[Mixed[ExampleSet], tuple[Given, ...]]:
    """(training examples or pairs, held-out ones)."""
    data = _settings_of(name, generates, recipe)
    loading(f"data {data.title}")
    sets: list[ExampleSet] = []
    held_out: list[Given] = []
    num_items = 0
    opened = open_sources(data, 0 if generates else recipe.evaluation.items, RowKind(name))
    for settings, splits in zip(data.sources, opened, strict=True):
        sets.append(example_set(splits.train, tokenizer, settings, positions))
        if splits.evaluation is not None:
            items = example_set(splits.evaluation, tokenizer, settings, positions)
            held_out += evaluation_samples(items, EVALUATION_UID + num_items)
            num_items += len(items)
    return _mixed(data, sets), tuple(held_out)


def _mixed(data: DataSettings, sets: Sequence[Any]) -> Mixed[Any]:
    """Sets by source, each with its weight, or with as many shares as it has rows."""
    return Mixed(
        tuple(sets),
        tuple(one.label for one in data.sources) if data.more else ("",),
        tuple(float(one.weight or len(rows)) for one, rows in zip(data.sources, sets, strict=True)),
        tuple(one.shuffle for one in data.sources),
    )


def _settings_of(name: str, generates: bool, recipe: Recipe) -> DataSettings:
    """Where `examples` or `pairs` come from: `data`, unless that holds the prompts."""
    if not generates:
        return recipe.data
    if recipe.pretraining is None:
        raise ConfigError(f"the flow trains on `{name}` beside its prompts; set `pretraining.source` to their data")
    return recipe.pretraining


def load_tokenizer(model: str, key: str = "model") -> Any:
    """The tokenizer of a model name, without its weights.

    Args:
        key: of the recipe, for messages.

    Raises:
        ModelError: the model cannot be found, or its folder has no tokenizer.
    """
    loading(f"tokenizer of {model}")
    adapter = adapter_of(model)
    if adapter is None:
        folder = resolve(model)
    else:
        folder = adapter.folder if adapter.has_tokenizer else resolve(adapter.base)
    try:
        return tokenizer_of(folder, model)
    except ModelError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"key `{key}`: `{model}` has no tokenizer that can be read: {error}") from error


def recipe_text(recipe: Recipe) -> str:
    """The resolved recipe as YAML, as the run directory keeps it."""
    import yaml

    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def as_begun(old: Path, recipe: Recipe) -> Recipe:
    """The recipe of a run that is resumed: where it leaves the size of the KV pool open, what the stored one says."""
    sampling = read_tree(old).get("sampling")
    stored = sampling.get("kv_tokens") if isinstance(sampling, dict) else None
    return recipe if stored is None or recipe.sampling.kv_tokens is not None else _with_pool(recipe, stored)


def _stored(path: Path) -> dict[str, Any]:
    """What a run directory says of its recipe: all keys that there are now, unless it is no recipe any longer."""
    try:
        return load_recipe(path).model_dump(mode="json")
    except ConfigError:
        return read_tree(path)


def changed_keys(old: Path, new: Recipe) -> list[str]:
    """Dotted keys in which a stored recipe differs from `new`; a KV pool that `new` leaves open does not, nor does the
    default of a key that there was not when it was stored."""

    def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(tree, dict):
            return {prefix.rstrip("."): tree}
        return {key: value for name, child in tree.items() for key, value in flat(child, f"{prefix}{name}.").items()}

    new = as_begun(old, new)
    before, after = flat(_stored(old)), flat(new.model_dump(mode="json"))
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))

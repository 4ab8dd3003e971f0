"""Reads what a run is trained and measured on: prompts, examples, pairs, labelled responses, and those of each that are
held out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from plait.algorithms.kto import KTOOptions, unbalanced
from plait.data.examples import ExampleSet, Given, evaluation_samples, example_set, most_tokens
from plait.data.mismatched import mismatched
from plait.data.mixture import Mixed
from plait.data.prompts import PromptSet, evaluation_prompts, prompt_set
from plait.data.records import EVALUATION_UID, Prompt
from plait.data.settings import DataSettings
from plait.data.several_sources import check_there
from plait.data.sources import Splits
from plait.dataflow import LABELLED, MISMATCHED, CallKind, Dataflow
from plait.dataflow.from_samples import title_of_call
from plait.dataflow.graph import texts_of
from plait.dataflow.made_rows import source_of
from plait.dataflow.prompt_call import of_data
from plait.dataflow.unfit import nearest
from plait.errors import DataError
from plait.models.files.hub import check_model
from plait.models.files.known_shapes import is_shape
from plait.models.shape import ModelShape
from plait.observe.screen import say
from plait.recipes.evaluation_sets import evaluation_sets
from plait.recipes.length_limits import held_out_limit, prompt_limit
from plait.recipes.recipe import Recipe
from plait.recipes.trust import code_of
from plait.rewards.loading import check_defined
from plait.rewards.tool_calls import Tools
from plait.runtime.inputs.held_out import HeldOut
from plait.runtime.inputs.opened_rows import HeldOutRows, in_keys_of, in_section, open_rows, settings_of
from plait.runtime.inputs.tools import tools_of, with_tools


class RunData(NamedTuple):
    """What a run is trained and measured on; see `prepare.Prepared`."""

    columns: tuple[str, ...]
    train_set: Mixed[PromptSet] | None
    given: dict[str, Mixed[ExampleSet]]
    held_out: tuple[HeldOut, ...]
    tools: Tools | None


def read_data(dataflow: Dataflow, recipe: Recipe, tokenizer: Any, shape: ModelShape, *, trains: bool = True) -> RunData:
    """What a run trains and is measured on; with `trains` false it is only measured.

    Raises:
        ConfigError: the flow reads several data sets and generates from none, or a key of the data does not fit them.
        DataError: a source or one of its rows cannot be used.
    """
    opened = open_rows(dataflow, recipe)
    train_set, columns, tools = None, (), None
    if opened.prompts:
        if (tools := tools_of(recipe.turns.tools, tokenizer)) is not None:
            opened = with_tools(opened, tools.schemas)
        train_set, columns = _prompts(recipe, opened.prompts, tokenizer, prompt_limit(recipe, shape))
    given: dict[str, Mixed[ExampleSet]] = {}
    for name, splits in opened.given.items():
        settings = settings_of(name, dataflow, recipe)
        with in_keys_of(dataflow):
            given[name] = _given(settings, splits, tokenizer, shape.max_positions)
        if name == LABELLED and isinstance(dataflow.options, KTOOptions):
            _say_of_labels(given[name], settings.title, dataflow.options)
    held_out: list[HeldOut] = []
    first_uid = EVALUATION_UID
    for rows in opened.held_out:
        with rows.of.in_keys():
            if opened.prompts:
                held_out.append(_held_out_prompts(recipe, rows, tokenizer, shape, first_uid))
            else:
                held_out.append(_held_out_given(rows, given, tokenizer, shape.max_positions, first_uid))
        first_uid += held_out[-1].num_items
    data = RunData(columns, train_set, given, tuple(held_out), tools)
    _check_told(data)
    if trains or not opened.prompts:
        _check_written(dataflow, data)
    if trains:
        _say_of_repeats(data, recipe.prompts_per_step)
    return data


def _check_told(data: RunData) -> None:
    """Raises DataError where there are tools, and prompts that no chat template writes."""
    if data.tools is None:
        return
    sets = () if data.train_set is None else data.train_set.sets
    untold = [rows.source.name for rows in sets if not rows.encoder.is_chat]
    untold += [one.title for one in data.held_out if not all(prompt.is_chat for prompt in one.prompts)]
    if untold:
        raise DataError(
            f"{untold[0]}: `turns.tools` is set, but its prompts are texts that are sent raw, so the model would not "
            "know of tools; set `data.chat_template` to true, or reply by a function (`turns.reply`)"
        )


def _check_written(flow: Dataflow, data: RunData) -> None:
    """Raises DataError where the data lack a column that a function of the flow cannot write prompts without."""
    prompts = () if data.train_set is None else data.train_set.sets
    for node in (*flow.of_kind(CallKind.PROMPT), *flow.of_kind(CallKind.GRADE)):
        assert node.fn is not None, f"{node.call} has no function"
        made_by = source_of(flow, node.rows)
        name = LABELLED if made_by.call == MISMATCHED else made_by.call
        sets = prompts if made_by.kind is CallKind.GENERATE else data.given[name].sets
        columns = [(rows.source.name, rows.source.columns) for rows in sets]
        for held_out in data.held_out:
            columns += [(held_out.title, tuple(one.sample.prompt.columns)) for one in held_out.given.get(name, ())]
        for (source, found), wanted in product(columns, of_data(node.fn, (*node.inputs, *texts_of(node)))):
            if wanted not in found:
                others = [column for column in found if column != "prompt"]
                names = ", ".join(f"`{name}`" for name in others) or "none"
                raise DataError(
                    f"{source}: {title_of_call(node)} needs the column `{wanted}`{nearest(wanted, others)}, found "
                    f"{names}; add it to the data, give the parameter a default, or hand it over in the flow "
                    f"(`{wanted}=…`)"
                )


def _say_of_repeats(data: RunData, per_step: int) -> None:
    """Say where a batch has to hold rows several times, whatever `epochs` asks for."""
    for rows in (*(() if data.train_set is None else (data.train_set,)), *data.given.values()):
        if per_step > len(rows):
            names = ", ".join(source.source.name for source in rows.sets)
            count = (
                f"{len(rows):,} row{'s are' if len(rows) > 1 else ' is'} fewer than `prompts_per_step` ({per_step:,})"
            )
            say(f"{names}: {count}, so a batch is {per_step / len(rows):.3g} passes over them", file=sys.stderr)


def _prompts(
    recipe: Recipe, opened: Sequence[Splits], tokenizer: Any, limit: int
) -> tuple[Mixed[PromptSet], tuple[str, ...]]:
    """(training prompts, columns of the data)."""
    sets: list[PromptSet] = []
    columns: tuple[str, ...] = ()
    for settings, splits in zip(recipe.data.sources, opened, strict=True):
        sets.append(prompt_set(splits.train, tokenizer, settings, limit))
        _say_of(sets[-1], settings)
        columns = splits.train.columns
    return _mixed(recipe.data, sets), columns


def _given(data: DataSettings, opened: Sequence[Splits], tokenizer: Any, positions: int) -> Mixed[ExampleSet]:
    """Training examples, pairs or labelled responses."""
    sets: list[ExampleSet] = []
    for settings, splits in zip(data.sources, opened, strict=True):
        sets.append(example_set(splits.train, tokenizer, settings, positions))
        _say_of(sets[-1], settings)
    return _mixed(data, sets)


def _held_out_prompts(recipe: Recipe, rows: HeldOutRows, tokenizer: Any, shape: ModelShape, first_uid: int) -> HeldOut:
    """A set of prompts; uids from `first_uid` on."""
    limit, prompts = held_out_limit(recipe, shape, rows.of), list[Prompt]()
    for settings, source in rows.parts:
        if rows.of.source is not None and source.conversational:  # what `data` says of texts alone is not about them
            of_texts = {"prompt_template": None, "examples": ()}
            settings = settings.model_copy(
                update={key: no for key, no in of_texts.items() if getattr(settings, key) == getattr(recipe.data, key)}
            )
        items = prompt_set(source, tokenizer, settings, limit)
        _say_of_held_out(items)
        prompts += evaluation_prompts(items, first_uid + len(prompts))
    return HeldOut(rows.of.label, rows.of.answering, prompts=tuple(prompts))


def _held_out_given(
    rows: HeldOutRows, given: Mapping[str, Mixed[ExampleSet]], tokenizer: Any, positions: int, first_uid: int
) -> HeldOut:
    """A set of examples, pairs or labelled responses; uids from `first_uid` on.

    Args:
        given: what the flow trains on, which is all of one kind.
    """
    ((name, trained),) = given.items()
    samples, count = list[Given](), 0
    for settings, source in rows.parts:
        items = example_set(source, tokenizer, settings, positions)
        _say_of_held_out(items)
        samples += evaluation_samples(items, first_uid + count)
        count += len(items)
    of_calls = {name: tuple(samples)}
    if name == LABELLED:
        of_calls[MISMATCHED] = tuple(mismatched(samples, most_tokens(trained)))
    return HeldOut(rows.of.label, rows.of.answering, given=of_calls)


def _say_of(rows: PromptSet | ExampleSet, settings: DataSettings) -> None:
    """Say what nobody may have meant: of how many rows it holds, or of their template."""
    dropped, going_on = rows.num_dropped, rows.num_going_on if isinstance(rows, PromptSet) else 0
    for number, count, what in (
        (dropped, len(rows) + dropped, "rows are left out (`data.overlong_prompts: drop`)"),
        (going_on, len(rows), "prompts end with words of the assistant: responses go on from these"),
    ):
        if number:
            say(f"{settings.source}: {number:,} of {count:,} {what}", file=sys.stderr)
    if isinstance(rows, ExampleSet) and rows.num_parted:
        several = f"{rows.num_parted:,} conversations are several examples each ({len(rows) + dropped:,} in all)"
        why = "the chat template writes earlier turns in another way once others follow"
        say(f"{settings.source}: {several}, as {why}", file=sys.stderr)
    template = settings.prompt_template or ""
    for column in rows.source.columns:
        if f"{{{column}}}" in template and column != "question":
            kept = (
                f"`data.prompt_template` keeps {{{column}}} as it stands: only {{question}} is replaced, by the prompt"
            )
            say(f"{settings.source}: {kept}", file=sys.stderr)


def _say_of_held_out(items: PromptSet | ExampleSet) -> None:
    """Say how many items an evaluation is without."""
    if dropped := items.num_dropped:
        count = f"{dropped:,} of {len(items) + dropped:,} held-out items"
        say(f"{items.source.name}: {count} are left out (`data.overlong_prompts: drop`)", file=sys.stderr)


def _say_of_labels(given: Mixed[ExampleSet], title: str, options: KTOOptions) -> None:
    """Say how the labels of KTO's data are divided, where the weights of the losses do not fit that."""
    labels = [bool(rows.source[place].columns["label"]) for rows in given.sets for place in rows.kept]
    told = unbalanced(sum(labels), len(labels) - sum(labels), options)
    if told is not None:
        say(f"{title}: {told}", file=sys.stderr)


def _mixed(data: DataSettings, sets: Sequence[Any]) -> Mixed[Any]:
    """Sets by source, each with its weight, or with as many shares as it has rows."""
    return Mixed(
        tuple(sets),
        tuple(source.label for source in data.sources) if data.more else ("",),
        tuple(float(source.weight or len(rows)) for source, rows in zip(data.sources, sets, strict=True)),
        tuple(source.shuffle for source in data.sources),
    )


def check_files(recipe: Recipe) -> None:
    """See that the files of data, the models and the functions that a recipe names are there, before anything is
    loaded. Of a model that is not there (`known_shapes`) a dry run reads none of them.

    Raises:
        ConfigError, DataError, ModelError: one is not, as far as files tell, or the path of a function has no form of
            one.
    """
    if is_shape(recipe.model):
        return
    for name in recipe.models_named().values():
        check_model(name)
    for key, functions in code_of(recipe).items():
        for path in functions:
            check_defined(path, key=key)
    for section, settings in (("data", recipe.data), ("pretraining", recipe.pretraining)):
        if settings is not None:
            with in_section(section):
                check_there(settings)
    for one in evaluation_sets(recipe):
        if one.source is not None:
            with one.in_keys():
                check_there(one.source)

"""The rows of a run's data as they stand in their sources, before a tokenizer is there. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from plait.data.formats import RowKind
from plait.data.made_rows import RowFunction
from plait.data.movie_reviews import PREFIX
from plait.data.numbers import check_numbers, names_asked
from plait.data.settings import DataSettings
from plait.data.several_sources import open_sources
from plait.data.sources import Source, Splits, open_held_out
from plait.dataflow import LABELLED, MISMATCHED, CallKind, Dataflow
from plait.errors import ConfigError, DataError
from plait.models.files.known_shapes import is_shape
from plait.observe.loading import loading
from plait.recipes.evaluation_sets import EvaluationSet, evaluation_sets
from plait.recipes.recipe import Recipe
from plait.rewards.loading import load_function

EARLY_BYTES = 16 << 20
"""Files up to this size, together, are read before torch is there, and once more when it is: that takes less time than
torch does. What is wrong with larger ones is told later, by the same check."""


class HeldOutRows(NamedTuple):
    """The items of an evaluation set, and by which settings those of each source become prompts or examples."""

    of: EvaluationSet
    parts: tuple[tuple[DataSettings, Source], ...]


class Opened(NamedTuple):
    """Rows by source, in the order of the recipe."""

    prompts: tuple[Splits, ...]
    """Empty where the flow generates nothing."""
    given: Mapping[str, tuple[Splits, ...]]
    """By what the flow reads: examples, pairs, labelled responses."""
    held_out: tuple[HeldOutRows, ...]
    """Items of evaluations: of what the flow answers, or else of what it reads."""


def open_rows(flow: Dataflow, recipe: Recipe) -> Opened:
    """Read what a flow trains on and is measured on.

    Raises:
        ConfigError: the flow reads several data sets and generates from none, a section is missing, or the function of
            `data.rows` cannot be loaded.
        DataError: a source or one of its rows cannot be used, as far as no tokenizer is needed to see that.
    """
    generates = bool(flow.of_kind(CallKind.GENERATE))
    names = given_names(flow)
    if not generates and len(names) > 1:
        raise ConfigError(f"the flow `{flow.name}` reads {' and '.join(names)}; one of them is its data")
    sets = evaluation_sets(recipe)
    kinds = [RowKind.PROMPTS] if generates else [RowKind(name) for name in names]
    own = _of_own_sources(sets, kinds[0])
    items = max((one.items or 0 for one in sets if one.source is None), default=0)
    questions = {row.question for source in own.values() for row in source.rows}
    prompts: tuple[Splits, ...] = ()
    held_out: tuple[HeldOutRows, ...] = ()
    if generates:
        loading(f"data {recipe.data.title}")
        prompts = open_sources(recipe.data, items, held_elsewhere=questions, find=_find)
        asked = names_asked(flow.of_kind(CallKind.GENERATE))
        for splits in prompts:
            check_numbers(splits.train.rows, asked)  # no flow reads those that are held out
        held_out = _held_out(recipe, sets, own, prompts)
        questions |= {row.question for one in held_out for _, source in one.parts for row in source.rows}
        items = 0
    given: dict[str, tuple[Splits, ...]] = {}
    for name in names:
        with in_keys_of(flow):
            settings = settings_of(name, flow, recipe)
            loading(f"data {settings.title}")
            given[name] = open_sources(settings, items, RowKind(name), questions, _find)
        if not generates:
            held_out = _held_out(recipe, sets, own, given[name])
        read = (name, MISMATCHED) if name == LABELLED else (name,)
        asked = names_asked(node for node in flow.of_kind(CallKind.READ) if node.call in read)
        measured = [] if generates else [source for one in held_out for _, source in one.parts]
        for source in (*(splits.train for splits in given[name]), *measured):
            check_numbers(source.rows, asked)  # also those that a loss is measured on
    return Opened(prompts, given, held_out)


def _of_own_sources(sets: Sequence[EvaluationSet], kind: RowKind) -> dict[str, Source]:
    """Label of each set that has a source of its own → its items."""
    found: dict[str, Source] = {}
    for one in sets:
        if one.source is not None:
            loading(f"held-out items {one.source.source}")
            with one.in_keys():
                found[one.label] = open_held_out(one.source, one.items, kind, partial(_find, key=f"{one.section}.rows"))
    return found


def _held_out(
    recipe: Recipe, sets: Sequence[EvaluationSet], own: Mapping[str, Source], opened: Sequence[Splits]
) -> tuple[HeldOutRows, ...]:
    """The items of all sets.

    Args:
        own: as `_of_own_sources`; the others are held out of the data.
        opened: the data, source by source, which hold out as many as any set asks for.
    """
    found: list[HeldOutRows] = []
    for one in sets:
        parts = [(one.source, own[one.label])] if one.source is not None else []
        if one.source is None:
            for settings, splits in zip(recipe.data.sources, opened, strict=True):
                assert splits.evaluation is not None, "as many are held out as are asked for"
                rows = splits.evaluation.rows[: one.items]
                parts.append((settings, replace(splits.evaluation, rows=rows)))
        found.append(HeldOutRows(one, tuple(parts)))
    return tuple(found)


def check_rows(flow: Dataflow, recipe: Recipe) -> None:
    """`open_rows`, where that takes no time: of files up to `EARLY_BYTES` of which no function of the user's makes
    rows. Raises as it does."""
    sections = (recipe.data, *([] if recipe.pretraining is None else [recipe.pretraining]))
    of_sets = [one.source for one in evaluation_sets(recipe) if one.source is not None]
    sources = [*(source for section in sections for source in section.sources), *of_sets]
    if is_shape(recipe.model) or not all(map(_is_file, sources)):
        return
    if sum(map(os.path.getsize, {source.source for source in sources})) <= EARLY_BYTES:
        open_rows(flow, recipe)


def _find(path: str, key: str = "data.rows") -> RowFunction:
    return load_function(path, key=key)


def _is_file(source: DataSettings) -> bool:
    is_other = source.task is not None or source.source.startswith(PREFIX) or source.rows is not None
    return not is_other and os.path.isfile(source.source)


def given_names(flow: Dataflow) -> tuple[str, ...]:
    """What a flow reads of given samples."""
    return tuple(node.call for node in flow.of_kind(CallKind.READ) if node.call != MISMATCHED)


def settings_of(name: str, flow: Dataflow, recipe: Recipe) -> DataSettings:
    """Where given samples come from: `data`, unless that holds the prompts. Raises ConfigError: there is no other
    section."""
    if not flow.of_kind(CallKind.GENERATE):
        return recipe.data
    if recipe.pretraining is None:
        without = ", or `options.ptx_coef` to 0" if recipe.options.get("ptx_coef") else ""
        raise ConfigError(
            f"the flow trains on `{name}` beside its prompts, but `pretraining` is not set; set `pretraining.source` "
            f"to their data{without}"
        )
    return recipe.pretraining


@contextmanager
def in_keys_of(flow: Dataflow) -> Iterator[None]:
    """What is wrong with given samples of a flow is told by the keys of the section that names them."""
    with in_section("pretraining" if flow.of_kind(CallKind.GENERATE) else "data"):
        yield


@contextmanager
def in_section(section: str) -> Iterator[None]:
    """What is wrong with data is told by the keys of the section that names them: raises DataError and ConfigError as
    what is done inside does, so worded."""
    try:
        yield
    except (DataError, ConfigError) as error:
        raise error.worded(str(error).replace("`data.", f"`{section}.")) from None

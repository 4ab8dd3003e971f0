"""The rows of a run's data as they stand in their sources, before a tokenizer is there. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from plait.data.formats import RowKind
from plait.data.made_rows import RowFunction
from plait.data.movie_reviews import PREFIX
from plait.data.numbers import check_numbers, names_asked
from plait.data.settings import DataSettings
from plait.data.sources import Splits, open_sources, questions_held_out
from plait.dataflow import LABELLED, MISMATCHED, CallKind, Dataflow
from plait.errors import ConfigError, DataError
from plait.models.files.known_shapes import is_shape
from plait.observe.loading import loading
from plait.recipes.recipe import Recipe
from plait.rewards.loading import load_function

EARLY_BYTES = 16 << 20
"""Files up to this size, together, are read before torch is there, and once more when it is: that takes less time than
torch does. What is wrong with larger ones is told later, by the same check."""


class Opened(NamedTuple):
    """Rows by source, in the order of the recipe."""

    prompts: tuple[Splits, ...]
    """Empty where the flow generates nothing."""
    given: Mapping[str, tuple[Splits, ...]]
    """By what the flow reads: examples, pairs, labelled responses."""


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
    prompts: tuple[Splits, ...] = ()
    if generates:
        loading(f"data {recipe.data.title}")
        prompts = open_sources(recipe.data, recipe.evaluation.items, find=_find)
        asked = names_asked(flow.of_kind(CallKind.GENERATE))
        for splits in prompts:
            check_numbers(splits.train.rows, asked)  # no flow reads those that are held out
    questions, items = questions_held_out(prompts), 0 if generates else recipe.evaluation.items
    given: dict[str, tuple[Splits, ...]] = {}
    for name in names:
        with in_keys_of(flow):
            settings = settings_of(name, flow, recipe)
            loading(f"data {settings.title}")
            given[name] = open_sources(settings, items, RowKind(name), questions, _find)
            read = (name, MISMATCHED) if name == LABELLED else (name,)
            asked = names_asked(node for node in flow.of_kind(CallKind.READ) if node.call in read)
            for source in (source for splits in given[name] for source in (splits.train, splits.evaluation) if source):
                check_numbers(source.rows, asked)  # also those that a loss is measured on
    return Opened(prompts, given)


def check_rows(flow: Dataflow, recipe: Recipe) -> None:
    """`open_rows`, where that takes no time: of files up to `EARLY_BYTES` of which no function of the user's makes
    rows. Raises as it does."""
    sections = (recipe.data, *([] if recipe.pretraining is None else [recipe.pretraining]))
    sources = [source for section in sections for source in section.sources]
    if is_shape(recipe.model) or not all(map(_is_file, sources)):
        return
    paths = {path for source in sources for path in (source.source, source.evaluation_source) if path is not None}
    if sum(map(os.path.getsize, paths)) <= EARLY_BYTES:
        open_rows(flow, recipe)


def _find(path: str) -> RowFunction:
    return load_function(path, key="data.rows")


def _is_file(source: DataSettings) -> bool:
    names = (source.source, *([] if source.evaluation_source is None else [source.evaluation_source]))
    is_other = source.task is not None or source.source.startswith(PREFIX) or source.rows is not None
    return not is_other and all(os.path.isfile(name) for name in names)


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
    """What is wrong with data is told by the keys of the section that names them: raises DataError as what is done
    inside does, so worded."""
    try:
        yield
    except (DataError, ConfigError) as error:
        worded = type(error)(str(error).replace("`data.", f"`{section}."))
        worded.frames = error.frames
        raise worded from None

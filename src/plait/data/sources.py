"""Rows to ask or to learn, from files, tasks or film reviews; split so that no held-out question is trained on.

A row is a dict of columns. `prompt` is a text, or a list of messages `{"role": …, "content": …}`; every other column
reaches the reward. The splits are a function of the data settings alone, never of the run's seed. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.data import files, movie_reviews
from plait.data.chat import with_template_column
from plait.data.formats import (
    Row,
    RowKind,
    parts_of,
    text_of,
)
from plait.data.held_out import hold_out, ordered
from plait.data.labels import rows_of_record, unpaired
from plait.data.made_rows import FindFunction, RowMaker, maker_of
from plait.data.one_format import check_one_format
from plait.data.settings import DEFAULT_TASK_SIZE, DataSettings
from plait.dataflow.unfit import nearest
from plait.errors import DataError


@dataclass(frozen=True)
class Source:
    """Rows of one format: all prompts are texts, or all are messages."""

    name: str
    rows: tuple[Row, ...]
    kind: RowKind = RowKind.PROMPTS
    raw: bool = False
    """Text prompts are beginnings of texts to go on from, so `data.chat_template: auto` sends them raw."""
    label: str = ""
    """Name of one among several sources, for metrics."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that reach the reward, `prompt` included."""
        return tuple(self.rows[0].columns)

    @property
    def conversational(self) -> bool:
        return not isinstance(self.rows[0].prompt, str)

    def told(self, kwargs: Mapping[str, Any]) -> Source:
        """The same rows, of which the chat template is told this."""
        return replace(self, rows=tuple(with_template_column(row, kwargs) for row in self.rows))


@dataclass(frozen=True)
class Splits:
    train: Source
    evaluation: Source | None
    """None when no item was asked for."""
    num_removed: int
    """Rows of the training file that were left out because their question is held out."""


def without(splits: Splits, name: str, held_out: Collection[str]) -> Splits:
    """The same without training rows of these questions. Raises DataError: none is left."""
    kept = tuple(row for row in splits.train.rows if row.question not in held_out)
    if not kept:
        raise DataError(
            f"source `{name}`: every row is held out, here, in another source or in one of `evaluation.sets`; lower "
            "`evaluation.items`, or the `items` of the set"
        )
    removed = splits.num_removed + len(splits.train) - len(kept)
    return replace(splits, train=replace(splits.train, rows=kept), num_removed=removed)


def open_splits(
    settings: DataSettings,
    evaluation_items: int = 0,
    kind: RowKind = RowKind.PROMPTS,
    held_elsewhere: Collection[str] = (),
    find: FindFunction | None = None,
) -> Splits:
    """Read or draw the training rows and `evaluation_items` held-out ones, disjoint by the text of the question.

    The question is the prompt; of rows that are learnt whole, all of the text; where all examples or pairs have the
    same prompt, their completions. Held-out questions are distinct, and depend neither on `data.size` nor on the seed
    of a run.

    Args:
        held_elsewhere: questions that other data of the run hold out; they are not trained on.
        find: finds the function that `data.rows` names.

    Raises:
        ConfigError: `find` raises it.
        DataError: the source is missing, malformed, empty or too small; the message names the key to change.
    """
    _check_rows_key(settings)
    if settings.task is not None:
        splits = _task_splits(settings, settings.task, evaluation_items, kind)
        return without(splits, settings.source, held_elsewhere)
    rows, raw = _given_rows(settings, kind, find)
    held_out = hold_out(ordered(rows, kind), evaluation_items, settings.seed, settings.source, "evaluation.items")
    questions = {row.question for row in held_out}.union(held_elsewhere)
    train = [row for row in rows if row.question not in questions]
    if not train:
        raise DataError(
            f"`{settings.source}`: no row is left to train on after {len(questions)} held-out questions; "
            "lower `evaluation.items` or give more rows in `data.source`"
        )
    if settings.size is not None and settings.size > len(train):
        raise DataError(
            f"`data.size` asks for {settings.size} training {kind.noun}, but `{settings.source}` has {len(train)} "
            "beside the held-out ones; lower `data.size`"
        )
    evaluation = Source(settings.source, tuple(held_out), kind, raw) if held_out else None
    return Splits(Source(settings.source, tuple(train[: settings.size]), kind, raw), evaluation, len(rows) - len(train))


def _check_rows_key(settings: DataSettings) -> None:
    if settings.rows is not None and (settings.task or settings.source.startswith(movie_reviews.PREFIX)):
        raise DataError(f"`data.rows` is for files and data sets, but `data.source` is `{settings.source}`; remove it")


def open_held_out(
    settings: DataSettings,
    items: int | None,
    kind: RowKind = RowKind.PROMPTS,
    find: FindFunction | None = None,
) -> Source:
    """Read or draw rows of a source that has nothing but held-out ones: `items` of distinct questions, chosen as
    `open_splits` chooses those that it holds out; None: one of each question.

    Args:
        find: as there.

    Raises:
        ConfigError: `find` raises it.
        DataError: as there; all of a task are asked for, which has no end.
    """
    _check_rows_key(settings)
    if settings.task is None:
        rows, raw = _given_rows(settings, kind, find)
        held_out = hold_out(ordered(rows, kind), items, settings.seed, settings.source, "data.items")
        return Source(settings.source, tuple(held_out), kind, raw)
    from plait.data import tasks

    _check_task(settings, kind)
    if items is None:
        raise DataError(f"`data.items` is all, but the task `{settings.task}` has no end; give a number")
    rows, _ = tasks.draw_in_child(settings.task, settings.parameters, settings.seed, items, 0)
    if len(rows) < items:
        raise DataError(
            f"task `{settings.task}` gave {len(rows)} distinct questions, fewer than {items} items; lower `data.items` "
            "or widen `data.parameters`"
        )
    return Source(settings.source, tuple(rows))


def _given_rows(settings: DataSettings, kind: RowKind, find: FindFunction | None) -> tuple[list[Row], bool]:
    """All rows of a source that is no task, and whether they are beginnings of texts (`Source.raw`). Raises
    DataError."""
    if settings.source.startswith(movie_reviews.PREFIX):
        return _reviews(settings, kind), True
    if settings.parameters:
        raise DataError(
            "`data.parameters` belongs to a reasoning_gym task or the film reviews, but `data.source` is a file; "
            "remove it"
        )
    maker = maker_of(settings.rows, find)
    return read_rows(settings.source, kind, settings.prompt_column, key="data.source", maker=maker), False


def _reviews(settings: DataSettings, kind: RowKind) -> list[Row]:
    name = settings.source.removeprefix(movie_reviews.PREFIX)
    if name not in movie_reviews.SETS:
        raise DataError(
            f"`data.source`: the film reviews have no set `{name}`{nearest(name, movie_reviews.SETS)}; give "
            f"{', '.join(movie_reviews.PREFIX + kind for kind in movie_reviews.SETS)}"
        )
    wanted = RowKind.PAIRS if kind is RowKind.LABELLED else kind
    if name != wanted:
        raise DataError(
            f"`data.source`: {kind.noun} are needed; give {movie_reviews.PREFIX}{wanted}, not `{settings.source}`"
        )
    if settings.prompt_column != "prompt":
        raise DataError("`data.prompt_column` is for files; the film reviews name their columns themselves, remove it")
    rows = movie_reviews.review_rows(wanted, settings.parameters)
    return [row for pair in rows for row in unpaired(pair)] if kind is RowKind.LABELLED else rows


def read_rows(
    name: str,
    kind: RowKind = RowKind.PROMPTS,
    prompt_column: str = "prompt",
    *,
    key: str = "data.source",
    maker: RowMaker | None = None,
) -> list[Row]:
    """Rows of a file or a data set (see `files`), absent columns None.

    Args:
        maker: makes other records of those of the source.

    Raises:
        DataError: the file is missing or empty, a record is malformed (its place is named), a column is absent (the
            nearest one is named) or neither text nor messages, formats are mixed.
    """
    records = files.read_records(name, key)
    if maker is not None:
        records = maker.made_of(records)
    rows = [row for value, place in records for row in rows_of_record(value, kind, prompt_column, place)]
    if not rows:
        left = "" if maker is None else " of which `data.rows` makes one"
        raise DataError(f"`{name}` holds no row{left}; give another source in `{key}`")
    check_one_format(rows, kind)
    if kind is not RowKind.PROMPTS and len({row.question for row in rows}) == 1:
        # One prompt for all says nothing of what a row is about, and would leave none to hold out.
        rows = [replace(row, key=text_of(parts_of(row.columns, kind, row.place).completions)) for row in rows]
    names = dict.fromkeys(column for row in rows for column in row.columns)
    return [replace(row, columns={column: row.columns.get(column) for column in names}) for row in rows]


def read_prompts(path: Path, prompt_column: str = "prompt", *, key: str = "data.source") -> list[Row]:
    """`read_rows` of the prompts of a file.

    Raises:
        DataError: as `read_rows`.
    """
    return read_rows(str(path), RowKind.PROMPTS, prompt_column, key=key)


def _check_task(settings: DataSettings, kind: RowKind) -> None:
    if kind is not RowKind.PROMPTS:
        raise DataError(f"`data.source`: a reasoning_gym task has prompts, but {kind.noun} are needed; give a file")
    if settings.prompt_column != "prompt":
        raise DataError("`data.prompt_column` is for files; a task names its columns itself, remove it")


def _task_splits(settings: DataSettings, name: str, evaluation_items: int, kind: RowKind) -> Splits:
    from plait.data import tasks

    _check_task(settings, kind)
    wanted = settings.size or DEFAULT_TASK_SIZE
    held_out, train = tasks.draw_in_child(name, settings.parameters, settings.seed, evaluation_items, wanted)
    num_questions = len(held_out) + len(train)
    if len(held_out) < evaluation_items or not train:
        raise DataError(
            f"task `{name}` gave {num_questions} distinct questions, too few to hold out {evaluation_items} and train "
            "on others; lower `evaluation.items` or widen `data.parameters`"
        )
    if settings.size is not None and len(train) < settings.size:
        raise DataError(
            f"`data.size` asks for {settings.size} training questions, but task `{name}` gave only {len(train)} beside "
            f"{len(held_out)} held-out ones; lower `data.size` or widen `data.parameters`"
        )
    return Splits(
        Source(settings.source, tuple(train)), Source(settings.source, tuple(held_out)) if held_out else None, 0
    )

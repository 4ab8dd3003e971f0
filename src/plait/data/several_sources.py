"""The rows of all sources of a run: what one holds out, no other trains on, and all have the columns of all.
Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from plait.data import files, movie_reviews
from plait.data.formats import RowKind
from plait.data.made_rows import FindFunction
from plait.data.settings import DataSettings
from plait.data.sources import Source, Splits, open_splits, without
from plait.errors import ConfigError, DataError


def open_sources(
    settings: DataSettings,
    evaluation_items: int = 0,
    kind: RowKind = RowKind.PROMPTS,
    held_elsewhere: Collection[str] = (),
    find: FindFunction | None = None,
) -> tuple[Splits, ...]:
    """`open_splits` of each source, `evaluation_items` held out from each.

    Where there are several, no question that one holds out is trained on from another, and all rows have the columns of
    all (None where their own source lacks one).

    Args:
        held_elsewhere, find: as there.

    Raises:
        ConfigError, DataError: as there; the source is named where there are several.
    """
    if not settings.more:
        return (open_splits(settings, evaluation_items, kind, held_elsewhere, find),)
    opened = []
    for source in settings.sources:
        with _named(source):
            opened.append(open_splits(source, evaluation_items, kind, held_elsewhere, find))
    held_out = questions_held_out(opened)
    names = tuple(dict.fromkeys(name for splits in opened for name in splits.train.columns))
    return tuple(
        _beside_others(splits, source.label, held_out, names)
        for source, splits in zip(settings.sources, opened, strict=True)
    )


def questions_held_out(opened: Iterable[Splits]) -> frozenset[str]:
    """The questions of all held-out rows."""
    return frozenset(row.question for splits in opened if splits.evaluation for row in splits.evaluation.rows)


def check_there(settings: DataSettings) -> None:
    """See that the files of all sources are there; nothing of them is read.

    Raises:
        DataError: one is not.
    """
    for source in settings.sources:
        with _named(source) if settings.more else nullcontext():
            if source.task is None and not source.source.startswith(movie_reviews.PREFIX):
                files.check_there(source.source, "data.source")


@contextmanager
def _named(source: DataSettings) -> Iterator[None]:
    try:
        yield
    except (DataError, ConfigError) as error:
        raise error.worded(f"source `{source.label}`: {error}") from None


def _beside_others(splits: Splits, label: str, held_out: Collection[str], names: Sequence[str]) -> Splits:
    def widened(source: Source) -> Source:
        wide = tuple(replace(row, columns={name: row.columns.get(name) for name in names}) for row in source.rows)
        return replace(source, rows=wide, label=label)

    kept = without(splits, label, held_out)
    evaluation = None if kept.evaluation is None else widened(kept.evaluation)
    return replace(kept, train=widened(kept.train), evaluation=evaluation)

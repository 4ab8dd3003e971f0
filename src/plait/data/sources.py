"""Rows to ask: JSONL files in TRL's formats and generated tasks, split so that no held-out question is trained on.

A row is a dict of columns. `prompt` is a text, or a list of messages `{"role": …, "content": …}`; every other column
reaches the reward. The splits are a function of the data settings alone, never of the run's seed. Torch-free.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.data.settings import DEFAULT_TASK_SIZE, DataSettings
from plait.errors import DataError

SAMPLE_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Names under which a reward function gets the samples."""
LOG_ARGUMENTS = ("log_extra", "log_metric")
"""Names under which it gets functions to log with, if it asks for them."""


@dataclass(frozen=True)
class Row:
    columns: dict[str, Any]
    place: str
    """Where it comes from, for messages: `prompts.jsonl:12`, `chain_sum#17`."""

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        return self.columns["prompt"]

    @property
    def question(self) -> str:
        """The text by which splits are kept disjoint."""
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, sort_keys=True)


@dataclass(frozen=True)
class Source:
    """Rows of one format: all prompts are texts, or all are messages."""

    name: str
    rows: tuple[Row, ...]

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


@dataclass(frozen=True)
class Splits:
    train: Source
    evaluation: Source | None
    """None when no item was asked for."""
    num_removed: int
    """Rows of the training file that were left out because their question is held out."""


def open_splits(settings: DataSettings, evaluation_items: int = 0) -> Splits:
    """Read or draw the training rows and `evaluation_items` held-out ones, disjoint by the text of the question.

    Held-out questions are distinct, and depend neither on `data.size` nor on the seed of a run.

    Raises:
        DataError: the source is missing, malformed, empty or too small; the message names the key to change.
    """
    if settings.task is not None:
        return _task_splits(settings, settings.task, evaluation_items)
    if settings.parameters:
        raise DataError("`data.parameters` belongs to a reasoning_gym task, but `data.source` is a file; remove it")
    rows = read_jsonl(Path(settings.source), settings.prompt_column, key="data.source")
    if settings.evaluation_source is not None:
        if evaluation_items == 0:
            raise DataError("`data.evaluation_source` is set, but `evaluation.items` is 0; set how many items to take")
        pool = read_jsonl(Path(settings.evaluation_source), settings.prompt_column, key="data.evaluation_source")
        held_out = _hold_out(pool, evaluation_items, settings.seed, settings.evaluation_source)
        _check_one_format([*rows, *pool])
    else:
        held_out = _hold_out(rows, evaluation_items, settings.seed, settings.source)
    questions = {row.question for row in held_out}
    train = [row for row in rows if row.question not in questions]
    if not train:
        raise DataError(
            f"`{settings.source}`: no row is left to train on after {len(held_out)} held-out questions; "
            "lower `evaluation.items` or give more rows in `data.source`"
        )
    if settings.size is not None and settings.size > len(train):
        raise DataError(
            f"`data.size` asks for {settings.size} training prompts, but `{settings.source}` has {len(train)} "
            "beside the held-out ones; lower `data.size`"
        )
    evaluation = Source(settings.evaluation_source or settings.source, tuple(held_out)) if held_out else None
    return Splits(Source(settings.source, tuple(train[: settings.size])), evaluation, len(rows) - len(train))


def read_jsonl(path: Path, prompt_column: str = "prompt", *, key: str = "data.source") -> list[Row]:
    """Rows of a JSONL file, one object per line; blank lines are skipped, absent columns are None.

    Raises:
        DataError: the file is missing or empty, a line is malformed (file and line are named), the prompt column is
            absent (the nearest one is named), a prompt is neither text nor messages, formats are mixed.
    """
    rows = [Row(_columns(value, prompt_column, place), place) for value, place in _json_lines(path, key)]
    if not rows:
        raise DataError(f"`{path}` holds no row; give another file in `{key}`")
    _check_one_format(rows)
    names = dict.fromkeys(name for row in rows for name in row.columns)
    return [Row({name: row.columns.get(name) for name in names}, row.place) for row in rows]


def _json_lines(path: Path, key: str) -> Iterator[tuple[dict[str, Any], str]]:
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        near = nearest(path.name, [other.name for other in path.parent.glob("*")]) if path.parent.is_dir() else ""
        raise DataError(f"`{key}`: `{path}` {found}{near}; give a JSONL file, or reasoning_gym:TASK")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"`{path}` is not UTF-8 ({error.reason} at byte {error.start}); `{key}` takes JSONL") from None
    # `splitlines` would also cut at U+2028 and its like, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{place}: malformed JSON ({error.msg} at column {error.colno}); `{key}` takes one object per line"
            ) from None
        if not isinstance(value, dict):
            raise DataError(f"{place}: expected a JSON object with a column `prompt`, found {type(value).__name__}")
        if "\\ud" in line.lower():
            _check_surrogates(value, place)
        yield value, place


def _check_surrogates(value: dict[str, Any], place: str) -> None:
    """JSON can write half of a surrogate pair, which is no text: it can be neither tokenised nor written again."""
    for name, column in value.items():
        try:
            json.dumps({name: column}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            lone = ord(error.object[error.start])
            raise DataError(
                f"{place}: column `{name}` holds a lone surrogate (\\u{lone:04x}), which is no character; mend the text"
            ) from None


def _columns(value: dict[str, Any], prompt_column: str, place: str) -> dict[str, Any]:
    if prompt_column not in value:
        raise DataError(
            f"{place}: no column `{prompt_column}`{nearest(prompt_column, list(value))}; found "
            f"{', '.join(f'`{name}`' for name in value) or 'no column'}; set `data.prompt_column`"
        )
    for name in value:
        if name in SAMPLE_ARGUMENTS or name in LOG_ARGUMENTS:
            raise DataError(f"{place}: a reward gets something else as `{name}`; rename the column of that name")
    if value.get("images") or value.get("image"):
        raise DataError(f"{place}: column `images`: only text models are trained; remove the column")
    prompt = value[prompt_column]
    if isinstance(prompt, list):
        _check_messages(prompt, prompt_column, place)
    elif not isinstance(prompt, str):
        raise DataError(
            f"{place}: `{prompt_column}` must be a text or a list of messages, found {type(prompt).__name__}"
        )
    return {"prompt": prompt, **{name: column for name, column in value.items() if name != "prompt"}}


def _check_messages(messages: list[Any], column: str, place: str) -> None:
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(
                f'{place}: expected messages {{"role": …, "content": …}} in `{column}`, found {message!r:.80}'
            )
        content = message["content"]
        if content is None and message.get("tool_calls"):
            continue  # as tools are called in TRL's format
        if not isinstance(content, str | list):
            raise DataError(
                f"{place}: the content of a message in `{column}` must be a text (or null beside `tool_calls`), found "
                f"{json.dumps(message, ensure_ascii=False)[:80]}"
            )
    if not messages:
        raise DataError(f"{place}: `{column}` is an empty list of messages")


def _check_one_format(rows: Sequence[Row]) -> None:
    first = isinstance(rows[0].prompt, str)
    for row in rows:
        if isinstance(row.prompt, str) != first:
            formats = ("a text", "messages") if first else ("messages", "a text")
            raise DataError(
                f"mixed formats: the prompt of {rows[0].place} is {formats[0]}, that of {row.place} is {formats[1]}; "
                "make all rows alike"
            )


def _hold_out(rows: Sequence[Row], items: int, seed: int, name: str) -> list[Row]:
    """One row of each of `items` distinct questions, those whose keyed hash is least: no row's place matters."""
    if items == 0:
        return []
    unique = {row.question: row for row in reversed(rows)}
    if len(unique) < items:
        raise DataError(
            f"`evaluation.items` asks for {items} questions, `{name}` has {len(unique)} distinct ones; lower it"
        )
    key = seed.to_bytes(8, "little")
    ranked = sorted(unique, key=lambda text: hashlib.blake2b(text.encode(), key=key, digest_size=16).digest())
    return [unique[text] for text in ranked[:items]]


def _task_splits(settings: DataSettings, name: str, evaluation_items: int) -> Splits:
    from plait.data import tasks

    if settings.evaluation_source is not None:
        raise DataError("`data.evaluation_source` is for files; a task holds out questions of its own, remove it")
    if settings.prompt_column != "prompt":
        raise DataError("`data.prompt_column` is for files; a task names its columns itself, remove it")
    wanted = settings.size or DEFAULT_TASK_SIZE
    held_out, train = tasks.draw_in_child(name, settings.parameters, settings.seed, evaluation_items, wanted)
    found = len(held_out) + len(train)
    if len(held_out) < evaluation_items or not train:
        raise DataError(
            f"task `{name}` gave {found} distinct questions, too few to hold out {evaluation_items} and train on "
            "others; lower `evaluation.items` or widen `data.parameters`"
        )
    if settings.size is not None and len(train) < settings.size:
        raise DataError(
            f"`data.size` asks for {settings.size} training questions, but task `{name}` gave only {len(train)} beside "
            f"{len(held_out)} held-out ones; lower `data.size` or widen `data.parameters`"
        )
    return Splits(
        Source(settings.source, tuple(train)), Source(settings.source, tuple(held_out)) if held_out else None, 0
    )


def nearest(name: str, names: Sequence[str]) -> str:
    """` (did you mean …?)`, or nothing when no name is near."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean `{close[0]}`?)" if close else ""

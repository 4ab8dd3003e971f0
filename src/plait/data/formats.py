"""What the columns of a row mean: prompts to answer, examples to learn, pairs to prefer, responses with a label; in
TRL's formats. Torch-free.

| asked for | columns |
| prompts | `prompt` (text or messages) |
| examples | `prompt` + `completion` (texts or messages), or `messages`, or `text` |
| pairs | `prompt` + `chosen` + `rejected` (texts or messages), or `chosen` + `rejected` that begin alike; `margin` |
| labelled | `prompt` + `completion` (texts or messages) + `label`; or pairs (`labels`) |
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from plait.data.records import SAMPLE_UID
from plait.dataflow.unfit import nearest
from plait.errors import DataError
from plait.json_text import kind_of

SAMPLE_ARGUMENTS = ("prompts", "completions", "completion_ids", SAMPLE_UID)
"""Names under which a reward function gets the samples."""
LOG_ARGUMENTS = ("log_extra", "log_metric")
"""Names under which it gets functions to log with, if it asks for them."""

Messages = list[dict[str, Any]]


class RowKind(StrEnum):
    PROMPTS = "prompts"
    EXAMPLES = "examples"
    PAIRS = "pairs"
    LABELLED = "labelled"

    @property
    def noun(self) -> str:
        """What several rows are called."""
        return "labelled responses" if self is RowKind.LABELLED else self.value


_WANTED = {
    RowKind.PROMPTS: "`prompt`",
    RowKind.EXAMPLES: "`prompt` and `completion`, or `messages`, or `text`",
    RowKind.PAIRS: "`chosen` and `rejected`, with or without `prompt`",
    RowKind.LABELLED: "`prompt`, `completion` and `label`, or those of pairs",
}


@dataclass(frozen=True)
class Row:
    columns: dict[str, Any]
    place: str
    """Where it comes from, for messages: `prompts.jsonl:12`, `chain_sum#17`."""
    key: str | None = None
    """The text by which splits are kept disjoint, where it is not the prompt."""
    complete: bool = True
    """False where a source cut the completions: they do not end with the end-of-sequence token."""

    @property
    def prompt(self) -> str | Messages:
        return self.columns["prompt"]

    @property
    def question(self) -> str:
        """The text by which splits are kept disjoint."""
        return text_of(self.prompt) if self.key is None else self.key


@dataclass(frozen=True)
class Parts:
    """A row of examples or pairs as a prompt and its given completions."""

    prompt: str | Messages | None
    """None for `text`, which is learnt whole."""
    completions: tuple[str | Messages, ...]
    """One; for a pair chosen and rejected. Texts if the prompt is one (or None), else messages."""

    @property
    def conversational(self) -> bool:
        return not isinstance(self.completions[0], str)


def text_of(prompt: str | Messages | tuple[str | Messages, ...]) -> str:
    """A prompt, or completions, as one text to compare and to hash."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


_CALLED = {
    "prompt": ("question", "instruction", "query"),
    "completion": ("response", "output", "answer"),
    "messages": ("conversation", "dialogue", "dialog"),
}
"""Columns → what other data sets call them, as Alpaca's."""
_AS_LIST = "a list that is written as JSON in a text is to be a list"
_OF_TEXT = {
    kind: f"{_AS_LIST}, and a text to be learnt whole is the column `text`" if kind is RowKind.EXAMPLES else _AS_LIST
    for kind in RowKind
}
"""What to do where `messages` are a text."""
_CONVERSATIONS = 'make of `conversations` a column `{}`, lists of {{"role": "user" or "assistant", "content": …}}'
_NO_PROMPT = "no `prompt`, and `chosen` and `rejected` do not begin alike; give the prompt a column of its own"
_BESIDE_MESSAGES = "the prompt is a text, the completions are messages that do not begin alike; make it a list, too"


def make_row(value: dict[str, Any], kind: RowKind, prompt_column: str, place: str) -> Row:
    """A record as a row of that kind, its columns checked.

    Raises:
        DataError: a column is absent (the nearest one is named) or is neither text nor messages.
    """
    if seen := next((name for name in ("images", "image") if value.get(name)), None):
        raise DataError(f"{place}: column `{seen}`: only text models are trained; remove the column")
    if prompt_column not in value and (kind is RowKind.PROMPTS or prompt_column != "prompt"):
        missing = f"no column `{prompt_column}`{nearest(prompt_column, list(value))}"
        mend = "set `data.prompt_column`, or make rows of these by `data.rows`"
        mend = _CONVERSATIONS.format("prompt") if "conversations" in value else mend
        raise DataError(f"{place}: {missing}; found {', '.join(f'`{name}`' for name in value) or 'no column'}; {mend}")
    columns = dict(value)
    if prompt_column in value:
        prompt = _checked(value[prompt_column], prompt_column, place, may_be_none=kind is not RowKind.PROMPTS)
        columns = {"prompt": prompt, **{name: column for name, column in value.items() if name != "prompt"}}
    if kind is RowKind.PROMPTS:
        for name in value:
            if name in SAMPLE_ARGUMENTS or name in LOG_ARGUMENTS:
                raise DataError(f"{place}: functions get something else as `{name}`; rename the column of that name")
        return Row(columns, place)
    for name in ("messages", "completion", "chosen", "rejected"):
        if columns.get(name) is not None:
            columns[name] = _checked(columns[name], name, place)
    if isinstance(columns.get("messages"), str):
        raise DataError(f"{place}: `messages` must be a list of messages, found a text; {_OF_TEXT[kind]}")
    margin = columns.get("margin")
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin)
    if kind is RowKind.PAIRS and margin is not None and not is_number:
        raise DataError(f"{place}: `margin` must be a finite number (by how much `chosen` is better), found {margin!r}")
    parts = parts_of(columns, kind, place)
    completion = parts.completions[0]
    return Row(columns, place, key=text_of(completion if parts.prompt is None else parts.prompt))


def parts_of(columns: Mapping[str, Any], kind: RowKind, place: str) -> Parts:
    """Prompt and completions of a row of examples or pairs; an implicit prompt is found as TRL's `extract_prompt` does.

    Raises:
        DataError: the columns are of no such format, a completion is empty, texts and messages are mixed.
    """
    present = {name for name, column in columns.items() if column is not None}
    prompt = columns.get("prompt")
    if kind is RowKind.PAIRS and {"chosen", "rejected"} <= present:
        chosen, rejected = columns["chosen"], columns["rejected"]
        if type(chosen) is not type(rejected):
            raise DataError(f"{place}: `chosen` and `rejected` must both be texts or both messages; make them alike")
        # A text beside messages that hold it again, as some data sets have it: TRL's `maybe_extract_prompt`.
        if prompt is None or (isinstance(prompt, str) and not isinstance(chosen, str)):
            unlike = _NO_PROMPT if prompt is None else _BESIDE_MESSAGES
            prompt, chosen, rejected = _split_off_prompt(chosen, rejected, f"{place}: {unlike}")
        parts = Parts(prompt, (chosen, rejected))
        names = ("chosen", "rejected")
    elif {"prompt", "completion"} <= present and (
        kind is RowKind.EXAMPLES or (kind is RowKind.LABELLED and "label" in present)
    ):
        parts = Parts(prompt, (columns["completion"],))
        names = ("completion",)
    elif kind is RowKind.EXAMPLES and "messages" in present:
        parts = _of_conversation(columns["messages"], place)
        names = ("messages",)
    elif kind is RowKind.EXAMPLES and "text" in present:
        if not isinstance(columns["text"], str):
            raise DataError(f"{place}: `text` must be a text, found {kind_of(columns['text'])}")
        parts = Parts(None, (columns["text"],))
        names = ("text",)
    else:
        raise _wanting(kind, columns, place)
    for name, completion in zip(names, parts.completions, strict=True):
        _check_completion(parts.prompt, completion, name, place)
    return parts


def _wanting(kind: RowKind, columns: Mapping[str, Any], place: str) -> DataError:
    """What is said where a row has no columns of its kind."""
    present = [name for name, column in columns.items() if column is not None]
    of_completions = ("label",) if kind is RowKind.LABELLED else ("messages", "text")
    needed = ("chosen", "rejected") if kind is RowKind.PAIRS else ("prompt", "completion", *of_completions)
    others = sorted({*present} - {"prompt", *needed})
    missing = [name for name in needed if name not in present]
    misspelt = [(near[0], name) for name in missing if (near := difflib.get_close_matches(name, others, n=1))]
    if "conversations" in present and kind is RowKind.EXAMPLES:  # as ShareGPT names them
        mend = _CONVERSATIONS.format("messages")
    elif absent := [name for name in missing if name in columns]:
        mend = f"`{absent[0]}` is null; give it a value, or remove the row"
    elif renamed := misspelt or [
        (other, name) for name in missing for other in others if other in _CALLED.get(name, ())
    ]:
        taken = {name: other for other, name in reversed(renamed)}  # the first of several that could be meant
        renames = " and ".join(f"`{other}` to `{name}`" for name, other in reversed(taken.items()))
        mend = f"rename {renames}, in the file or by `data.rows`"
    else:
        mend = "rename the columns of `data.source`, in the file or by `data.rows`"
    names = ", ".join(f"`{name}`" for name in present)
    return DataError(f"{place}: {kind.noun} need the columns {_WANTED[kind]}; found {names or 'no column'}; {mend}")


def _split_off_prompt(chosen: Any, rejected: Any, unlike: str) -> tuple[Any, Any, Any]:
    """What both begin with, and the rest of each; `unlike` is said where they do not begin alike."""
    shortest = min(len(chosen), len(rejected))
    cut = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if cut == shortest:
        cut -= 1
    elif isinstance(chosen, str) and cut and chosen[cut - 1] == " ":
        cut -= 1  # the space belongs to the completion's first word
    if cut == 0:
        raise DataError(unlike)
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _of_conversation(messages: Messages, place: str) -> Parts:
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first is None:
        raise DataError(f"{place}: `messages` have no turn of the assistant, so there is nothing to learn; remove them")
    return Parts(messages[:first], (messages[first:],))


def _check_completion(prompt: str | Messages | None, completion: str | Messages, name: str, place: str) -> None:
    if prompt is not None and isinstance(prompt, str) != isinstance(completion, str):
        kinds = ("a text", "messages") if isinstance(prompt, str) else ("messages", "a text")
        raise DataError(f"{place}: the prompt is {kinds[0]}, but `{name}` is {kinds[1]}; make them alike")
    if isinstance(completion, str):
        if not completion.strip():
            raise DataError(f"{place}: `{name}` is empty, so there is nothing to learn; remove the row")
        return
    if not (turns := [message for message in completion if message["role"] == "assistant"]):
        raise DataError(f"{place}: `{name}` has no turn of the assistant, so there is nothing to learn; remove the row")
    for message in completion:
        _check_weight(message, name, place)
    if not any(map(is_learnt, turns)):
        raise DataError(
            f"{place}: all turns of the assistant in `{name}` say not to be learnt (`weight: 0`, `train: false`), so "
            "there is nothing to learn; remove the row"
        )
    for message in turns:
        if not message["content"] and not message.get("tool_calls"):
            raise DataError(f"{place}: a turn of the assistant in `{name}` is empty; remove the row")


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether a message of a completion is the assistant's, and does not say that it is not to be learnt: as OpenAI's
    format has it (`weight: 0`), or `train: false`."""
    return message["role"] == "assistant" and message.get("weight", 1) != 0 and message.get("train") is not False


def _check_weight(message: Mapping[str, Any], name: str, place: str) -> None:
    """Raises DataError where a message says that it is to be learnt otherwise than whole or not at all."""
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        found = f"found {weight!r:.40}; give one of them, or repeat the row"
        raise DataError(f"{place}: `weight` of a message in `{name}` must be 0 (not learnt) or 1 (learnt), {found}")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{place}: `train` of a message in `{name}` must be true or false, found {train!r:.40}")
    wanted = [key for key, value in (("weight", weight), ("train", train)) if value]
    if wanted and not is_learnt(message):
        why = "it says otherwise too" if message["role"] == "assistant" else "only what the assistant says is"
        raise DataError(
            f"{place}: a message of the role `{message['role']}` in `{name}` is to be learnt by its `{wanted[0]}`, but "
            f"{why}; remove the key"
        )


def checked_prompt(prompt: Any, place: str) -> str | Messages:
    """A prompt that somebody's code has written, as one of the data. Raises DataError: it is neither a text nor
    messages, or says nothing."""
    prompt = _checked(list(prompt) if isinstance(prompt, tuple) else prompt, "prompt", place)
    if not (prompt if isinstance(prompt, str) else any(m.get("content") or m.get("tool_calls") for m in prompt)):
        raise DataError(f"{place}: the prompt is empty")
    return prompt


def _checked(column: Any, name: str, place: str, *, may_be_none: bool = False) -> Any:
    if isinstance(column, list):
        return _messages(column, name, place)
    if not isinstance(column, str) and not (may_be_none and column is None):
        raise DataError(f"{place}: `{name}` must be a text or a list of messages, found {kind_of(column)}")
    return column


_OF_SHAREGPT = {"human": "user", "gpt": "assistant"}
"""Roles of no chat template, though many write down whatever stands there → those that are meant."""
_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
"""Those of most chat templates."""


def _messages(messages: list[Any], column: str, place: str) -> Messages:
    """The messages without keys that are None: table formats give every message the keys of all."""
    for message in messages:
        if not _is_message(message):
            raise DataError(
                f'{place}: expected messages {{"role": …, "content": …}} in `{column}`, found {message!r:.80}'
            )
        if (meant := _OF_SHAREGPT.get(message["role"])) is not None:
            found = f"a message in `{column}` has the role `{message['role']}`, as ShareGPT names it"
            raise DataError(f"{place}: {found}; write `{meant}`")
        if (role := message["role"]) not in _ROLES and (meant := role.strip().lower()) in _ROLES:
            raise DataError(f"{place}: a message in `{column}` has the role `{role}`; write `{meant}`")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue  # as tools are called in TRL's format
        if not isinstance(content, str) and not _are_texts(content):
            raise DataError(
                f"{place}: the content of a message in `{column}` must be a text, or a list of parts "
                f'{{"type": "text", "text": …}} (or null beside `tool_calls`), found '
                f"{json.dumps(message, ensure_ascii=False)[:80]}"
            )
    if not messages:
        raise DataError(f"{place}: `{column}` is an empty list of messages")
    said = [{name: value for name, value in message.items() if value is not None} for message in messages]
    return [message | {"content": _text(message.get("content"))} for message in said]


def _is_message(message: Any) -> bool:
    """Who calls tools need not say anything beside: TRL's format leaves `content` out there, or has null."""
    has_role = isinstance(message, dict) and isinstance(message.get("role"), str)
    return has_role and ("content" in message or bool(message.get("tool_calls")))


def _are_texts(content: Any) -> bool:
    """Whether a content is a list of parts that are texts."""
    parts = content if isinstance(content, list) else []
    return bool(parts) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )


def _text(content: str | list[dict[str, str]] | None) -> str | None:
    """Parts as one text, which every chat template takes: many would print a list as Python does."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content

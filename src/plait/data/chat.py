"""Text as the model reads it: chat templates, and the one BOS token.

Torch-free: the tokenizer comes in as an object of Transformers' interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jinja2 import TemplateError, TemplateSyntaxError

from plait.data.formats import Messages, Row
from plait.data.time_limit import OverTime, time_limit
from plait.errors import DataError
from plait.json_text import Malformed, parse

TEMPLATE_COLUMN = "chat_template_kwargs"
"""Column of what the template is told of a row beside its messages."""
RENDER_LIMIT_S = 5
"""Seconds for one prompt. Templates take well below a millisecond."""
MOST_RENDERED = 20_000_000
"""Characters of a prompt: more than any model has positions for."""
READS_TO_MARKER = "reads_to_marker"
"""In `tokenizer_config.json` of a scalar model that plait has trained: it knows conversations up to the marker that
closes their last turn, without the white space that the template writes behind it."""

_WRITTEN = ("user", "assistant")
"""Roles that every chat template writes."""

_OF_TEMPLATES = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the code of a template may raise."""


class Tokenizer(Protocol):
    """What is used of `transformers.PreTrainedTokenizerBase`."""

    chat_template: Any
    bos_token_id: int | None

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class EndingTokenizer(Tokenizer, Protocol):
    """A tokenizer whose end-of-sequence token is asked for: where completions are given."""

    eos_token: str | None
    all_special_ids: Any

    def get_added_vocab(self) -> Mapping[str, int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> Any: ...


def with_template_column(row: Row, told: Mapping[str, Any]) -> Row:
    """The row with what the template is told of all rows, where it says nothing else itself."""
    own = row.columns.get(TEMPLATE_COLUMN) or {}
    said = {**told, **own} if isinstance(own, Mapping) else own
    return replace(row, columns={**row.columns, TEMPLATE_COLUMN: said}) if told else row


def render(
    tokenizer: Tokenizer, messages: Messages, row: Row, *, remedy: str, begin_answer: bool, go_on: bool = False
) -> str:
    """Messages as the chat template writes them, with the row's `tools` and `chat_template_kwargs` as in TRL.

    Args:
        begin_answer: end with what opens an answer of the assistant.
        go_on: leave the last message open.
        remedy: what to change where the template refuses the messages.

    Raises:
        DataError: the chat template is none, or raises on these messages.
    """
    extra = row.columns.get(TEMPLATE_COLUMN) or {}
    if not isinstance(extra, Mapping):
        raise DataError(
            f"{row.place}: column `{TEMPLATE_COLUMN}` must be a mapping of names to values, found {extra!r:.80}"
        )
    how = {name: value for name, value in extra.items() if value is not None} | {"tools": _tools(row)}
    how |= {"add_generation_prompt": begin_answer, "continue_final_message": go_on}
    try:
        with time_limit(RENDER_LIMIT_S):
            text = _applied(tokenizer, messages, how)
    except OverTime:
        raise DataError(
            f"{row.place}: the chat template of the model took more than {RENDER_LIMIT_S} s to write the prompt; fix "
            f"the template, or change {remedy}"
        ) from None
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template of the model is not valid Jinja: line {error.lineno}: {error.message}; fix it in the "
            "folder of `model` (chat_template.jinja, or tokenizer_config.json)"
        ) from error
    except _OF_TEMPLATES as error:
        raise DataError(
            f"{row.place}: the chat template of the model refuses the prompt: "
            f"{str(error)[:500] or type(error).__name__} "
            f"(messages: {', '.join(message['role'] for message in messages)[:200]}); change {remedy}"
        ) from error
    if not isinstance(text, str) or len(text) > MOST_RENDERED:
        raise DataError(
            f"{row.place}: the chat template of the model writes {len(text):,} characters, more than "
            f"{MOST_RENDERED:,}; fix the template, or change {remedy}"
        )
    return text


def _applied(tokenizer: Tokenizer, messages: Messages, how: Mapping[str, Any]) -> Any:
    """What the template makes of messages. Most write the arguments of a call as JSON themselves, which OpenAI's API
    and data made by it have as text: so such a text is read, unless the template takes the text alone."""
    read = [_with_arguments(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(read, tokenize=False, **how)
    except _OF_TEMPLATES:
        if read == messages:
            raise
        return tokenizer.apply_chat_template(messages, tokenize=False, **how)


def _with_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as maps, where they are such in JSON."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_read_call(call) for call in calls]} if isinstance(calls, list) else {**message}


def _read_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _read_call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(Malformed):
            arguments = parse(arguments)
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def rendered_whole(
    tokenizer: Tokenizer, messages: Messages, row: Row, *, remedy: str, begin_answer: bool, go_on: bool = False
) -> str:
    """`render` of all messages of a row, which show its tools and what called them.

    Raises:
        DataError: as there; or the chat template writes the same without these, or without a message.
    """
    how: dict[str, Any] = {"remedy": remedy, "begin_answer": begin_answer, "go_on": go_on}
    text = render(tokenizer, messages, row, **how)
    for what, place in left_out(tokenizer, messages, row, text, how):
        if place is None:
            raise DataError(
                f"{row.place}: the chat template of the model leaves out {what}, so the model would not see them; give "
                "a `model` whose template writes them, or remove them (rename a column that only rewards read)"
            )
        raise DataError(
            f"{row.place}: the chat template of the model leaves out message {place + 1}, of {what}, so the model "
            f"would not see it; give a `model` whose template writes it, or change {remedy}"
        )
    return text


def left_out(
    tokenizer: Tokenizer, messages: Messages, row: Row, text: str, how: Mapping[str, Any]
) -> Iterator[tuple[str, int | None]]:
    """What a chat template does not write of a row: tools, what called them, or messages of a role that it does not
    know. Each is (its name in words, the place of the message or None).

    Args:
        text: what `render` gives for these messages with the arguments `how`.

    Raises:
        DataError: the column `tools` is no list.
    """
    bare_row = replace(row, columns={**row.columns, "tools": None})
    bare = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
    for what, is_there, less, less_row in (
        ("the column `tools`", _tools(row) is not None, messages, bare_row),
        ("`tool_calls`", any(message.get("tool_calls") for message in messages), bare, row),
    ):
        if is_there and text == _rendered_if_taken(tokenizer, less, less_row, how):
            yield what, None
    for place in not_found(messages, text):
        if text == _rendered_if_taken(tokenizer, [*messages[:place], *messages[place + 1 :]], row, how):
            yield f"the role `{messages[place]['role']}`", place


def not_found(messages: Messages, text: str) -> list[int]:
    """Places of the messages, but of roles that every template writes, whose content stands nowhere in a text. (One
    that is found may still be left out: it may say what the template, or another message, says by itself.)"""
    return [
        place
        for place, message in enumerate(messages)
        if message["role"] not in _WRITTEN and (message.get("content") or "").strip() not in text
    ]


def _rendered_if_taken(tokenizer: Tokenizer, messages: Messages, row: Row, how: Mapping[str, Any]) -> str | None:
    """None where the template refuses the messages."""
    try:
        return render(tokenizer, messages, row, **how)
    except DataError:
        return None


def _tools(row: Row) -> list[Any] | None:
    """Raises DataError where the column `tools` is no list, nor a text that is one in JSON."""
    tools = row.columns.get("tools")
    try:
        tools = parse(tools) if isinstance(tools, str) and tools else tools
    except Malformed as error:
        raise DataError(f"{row.place}: column `tools` must be a list in JSON: {error}") from None
    if tools and not isinstance(tools, list):
        raise DataError(f"{row.place}: column `tools` must be a list of tools, found {tools!r:.80}")
    return tools or None


class Ids:
    """Token ids of rendered texts, with a BOS token exactly where the tokenizer wants one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = list(tokenizer("a")["input_ids"])
        self._bos = tokenizer.bos_token_id if ids[:1] == [tokenizer.bos_token_id] else None

    def __call__(self, text: str, *, chat: bool) -> tuple[int, ...]:
        """A chat template writes its own BOS; raw text gets one if the tokenizer adds one and the text has none."""
        ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if chat or self._bos is None or ids[:1] == (self._bos,):
            return ids
        return (self._bos, *ids)


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length

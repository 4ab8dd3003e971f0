"""Text as the model reads it: chat templates, the one BOS token, and which part of a conversation the assistant wrote.

Torch-free: the tokenizer comes in as an object of Transformers' interface.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from plait.data.formats import Messages, Row
from plait.errors import DataError


class Tokenizer(Protocol):
    """What is used of `transformers.PreTrainedTokenizerBase`."""

    chat_template: Any
    bos_token_id: int | None

    def __call__(self, text: Any, *, add_special_tokens: bool = True) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...


class EndingTokenizer(Tokenizer, Protocol):
    """A tokenizer whose end-of-sequence token is asked for: where completions are given."""

    eos_token: str | None
    all_special_tokens: Any

    def get_added_vocab(self) -> Mapping[str, int]: ...


def render(
    tokenizer: Tokenizer, messages: Messages, row: Row, *, remedy: str, begin_answer: bool, go_on: bool = False
) -> str:
    """Messages as the chat template writes them, with the row's `tools` and `chat_template_kwargs` as in TRL.

    Args:
        begin_answer: end with what opens an answer of the assistant.
        go_on: leave the last message open.
        remedy: what to change where the template refuses the messages.

    Raises:
        DataError: the chat template raises on these messages.
    """
    tools = row.columns.get("tools") or None
    extra = row.columns.get("chat_template_kwargs") or {}
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            tokenize=False,
            add_generation_prompt=begin_answer,
            continue_final_message=go_on,
            **{name: value for name, value in extra.items() if value is not None},
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"{row.place}: the chat template of the model refuses the prompt: {error or type(error).__name__} "
            f"(messages: {', '.join(message['role'] for message in messages)}); change {remedy}"
        ) from error


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


class Spoken(NamedTuple):
    """A conversation in tokens, and where the assistant speaks in it."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """Half-open ranges of tokens, one per turn of the assistant, each with the token that closes the turn."""
    text: str
    """What the assistant said; of several turns, all that was written from the first to the last of them."""

    def after(self, cut: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens from `cut`, where the first turn begins, to the end of the last; and 1.0 for each spoken one."""
        stop = self.spans[-1][1]
        trained = [0.0] * (stop - cut)
        for begin, end in ((cut, self.spans[0][1]), *self.spans[1:]):
            trained[begin - cut : end - cut] = [1.0] * (end - begin)
        return self.token_ids[cut:stop], tuple(trained)


def find_spoken(
    prompt: Messages,
    turns: Messages,
    *,
    render: Callable[[Messages, bool], str],
    ids: Callable[[str], tuple[int, ...]],
    closing: Sequence[str],
    place: str,
) -> Spoken:
    """Find what the assistant says in `turns`, which follow `prompt` and hold a turn of the assistant.

    Few templates mark it (`{% generation %}`). But what a turn adds is what the conversation that ends with it has
    beyond one that ends by opening an answer, provided that each of these is the beginning of the next. For a lone turn
    TRL's weaker rule holds: what the tokens of the opened answer do not share with the whole is response.

    Args:
        render: messages → text; True: end with what opens an answer.
        ids: text → token ids.
        closing: special tokens, one of which closes a turn.

    Raises:
        DataError: the template writes a turn in another way once others follow.
    """
    messages = [*prompt, *turns]
    whole = render(messages, False)
    token_ids = ids(whole)
    spans: list[tuple[int, int]] = []
    first, end = len(whole), 0
    for number in range(len(prompt), len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        opened = render(messages[:number], True)
        closed = whole if number == len(messages) - 1 else render(messages[: number + 1], False)
        if not whole.startswith(closed) or (len(turns) > 1 and not closed.startswith(opened)):
            raise DataError(
                f"{place}: the chat template of the model writes turn {number + 1} of the conversation differently "
                "when it is the last (it drops its reasoning later, perhaps), so what the assistant wrote cannot be "
                "told; give each answer a row of its own in `data.source`, with `prompt` and `completion`"
            )
        first = min(first, len(opened))
        end = _end_of_turn(closed, closing)
        stop = len(token_ids) if end == len(whole) else shared_prefix(ids(whole[:end]), token_ids)
        spans.append((shared_prefix(ids(opened), token_ids), stop))
    said = _content(turns[0]) if len(turns) == 1 else whole[first:end]
    return Spoken(token_ids, tuple(spans), said)


def _end_of_turn(text: str, closing: Sequence[str]) -> int:
    """Where a turn that ends with `text` ends for the model: after the special token that closes it.

    Templates write a line break after that token, for the next turn; the model stops before it and never writes it.
    Where no special token closes the turn, all of it counts.
    """
    stripped = text.rstrip()
    return len(stripped) if stripped.endswith(tuple(token for token in closing if token)) else len(text)


def _content(message: dict[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""

"""Text as the model reads it: chat templates, the one BOS token, and which part of a conversation the assistant wrote.

Torch-free: the tokenizer comes in as an object of Transformers' interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

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
        DataError: the chat template raises on these messages.
    """
    extra = row.columns.get(TEMPLATE_COLUMN) or {}
    if not isinstance(extra, Mapping):
        raise DataError(
            f"{row.place}: column `{TEMPLATE_COLUMN}` must be a mapping of names to values, found {extra!r:.80}"
        )
    tools = _tools(row)
    try:
        with time_limit(RENDER_LIMIT_S):
            text = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=begin_answer,
                continue_final_message=go_on,
                **{name: value for name, value in extra.items() if value is not None},
            )
    except OverTime:
        raise DataError(
            f"{row.place}: the chat template of the model took more than {RENDER_LIMIT_S} s to write the prompt; mend "
            f"the template, or change {remedy}"
        ) from None
    except _OF_TEMPLATES as error:
        raise DataError(
            f"{row.place}: the chat template of the model refuses the prompt: "
            f"{str(error)[:500] or type(error).__name__} "
            f"(messages: {', '.join(message['role'] for message in messages)[:200]}); change {remedy}"
        ) from error
    if not isinstance(text, str) or len(text) > MOST_RENDERED:
        raise DataError(
            f"{row.place}: the chat template of the model writes {len(text):,} characters, more than "
            f"{MOST_RENDERED:,}; mend the template, or change {remedy}"
        )
    return text


def rendered_whole(
    tokenizer: Tokenizer, messages: Messages, row: Row, *, remedy: str, begin_answer: bool, go_on: bool = False
) -> str:
    """`render` of all messages of a row, which show its tools and what called them.

    Raises:
        DataError: as there; or the chat template writes the same without these.
    """
    how: dict[str, Any] = {"remedy": remedy, "begin_answer": begin_answer, "go_on": go_on}
    text = render(tokenizer, messages, row, **how)
    bare_row = replace(row, columns={**row.columns, "tools": None})
    bare = [{name: value for name, value in message.items() if name != "tool_calls"} for message in messages]
    for what, is_there, less, less_row in (
        ("the column `tools`", _tools(row) is not None, messages, bare_row),
        ("`tool_calls`", any(message.get("tool_calls") for message in messages), bare, row),
    ):
        if is_there and text == _rendered_if_taken(tokenizer, less, less_row, how):
            raise DataError(
                f"{row.place}: the chat template of the model leaves out {what}, so the model would not see them; give "
                "a `model` whose template writes them, or remove them (rename a column that only rewards read)"
            )
    return text


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


class Spoken(NamedTuple):
    """A conversation in tokens, and where the assistant speaks in it."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """Half-open ranges of tokens, one per turn of the assistant, each with the token that closes the turn."""
    at_once: bool
    """Whether the first of the turns is the assistant's."""

    def after(self, cut: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens from `cut`, the end of the prompt, to the end of the last turn; and 1.0 for each spoken one."""
        stop = self.spans[-1][1]
        trained = [0.0] * (stop - cut)
        first = (cut if self.at_once else self.spans[0][0], self.spans[0][1])
        for begin, end in (first, *self.spans[1:]):
            trained[begin - cut : end - cut] = [1.0] * (end - begin)
        return self.token_ids[cut:stop], tuple(trained)


class SpokenFinder:
    """Finds what the assistant says in a conversation. Few templates mark it (`{% generation %}`).

    What a turn adds is what the conversation that ends with it has beyond one that ends by opening an answer, provided
    that the template writes the turns before it as it writes them in the whole.
    """

    def __init__(self, tokenizer: EndingTokenizer, ids: Ids) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._markers = frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.get_added_vocab().values())

    def find(self, prompt: Messages, turns: Messages, row: Row, remedy: str) -> Spoken:
        """Where the assistant speaks in `turns`, which follow `prompt` and hold a turn of it.

        Raises:
            DataError: the template writes a turn in another way once others follow, or leaves out its content.
        """
        messages = [*prompt, *turns]

        def ids(count: int, begin_answer: bool = False) -> tuple[int, ...]:
            beginning = messages[:count]
            text = render(self._tokenizer, beginning, row, remedy=remedy, begin_answer=begin_answer)
            return self._ids(text, chat=True)

        whole = self._ids(rendered_whole(self._tokenizer, messages, row, remedy=remedy, begin_answer=False), chat=True)
        spans = []
        for number in range(len(prompt), len(messages)):
            if messages[number]["role"] != "assistant":
                continue
            before = self._reach(ids(number), whole, number, row)
            # An opened answer may hold more than the whole does, such as the begin of reasoning; the tokens from where
            # they part are response, as in TRL.
            begin = max(before, shared_prefix(ids(number, begin_answer=True), whole))
            end = len(whole)
            if number < len(messages) - 1:
                end = self._reach(ids(number + 1), whole, number + 1, row)
            end = self.closed(whole, begin, end)
            if messages[number]["content"] and all(self._says_nothing(token) for token in whole[begin:end]):
                raise DataError(
                    f"{row.place}: the chat template of the model leaves out what the assistant says in turn "
                    f"{number + 1}; give it another `content`, or another `model`"
                )
            spans.append((begin, end))
        return Spoken(whole, tuple(spans), turns[0]["role"] == "assistant")

    def _is_marker(self, token: int) -> bool:
        """Whether it is a special or an added token."""
        return token in self._markers

    def _says_nothing(self, token: int) -> bool:
        return token in self._markers or not self._tokenizer.decode([token]).strip()

    def _reach(self, part: Sequence[int], whole: Sequence[int], number: int, row: Row) -> int:
        """How far a conversation that ends after `number` messages agrees with the whole.

        At its end may stand what the template writes after a last turn alone (an end of the text).
        """
        reach = shared_prefix(part, whole)
        if all(self._says_nothing(token) for token in part[reach:]):
            return reach
        raise DataError(
            f"{row.place}: the chat template of the model writes the first {number} turns of the conversation "
            "differently once others follow (it drops their reasoning, perhaps), so what the assistant wrote cannot be "
            "told; give each answer a row of its own in `data.source`, with `prompt` and `completion`"
        )

    def closed(self, whole: Sequence[int], begin: int, end: int) -> int:
        """The end of a turn for the model: after the marker that closes it.

        Templates write a line break after it, for the next turn; the model stops before it and never writes it. Where
        no marker closes the turn the one that opens the next does: the model stops there.
        """
        last = self._before_blank(whole, begin, end)
        if last == begin or not self._is_marker(whole[last - 1]):
            return end + 1 if end < len(whole) and self._is_marker(whole[end]) else end
        # Some templates end a conversation with one marker more, after the line break.
        earlier = self._before_blank(whole, begin, last - 1)
        return earlier if begin < earlier < last - 1 and self._is_marker(whole[earlier - 1]) else last

    def _before_blank(self, whole: Sequence[int], begin: int, end: int) -> int:
        """`end`, less the white space before it."""
        while end > begin and not self._is_marker(whole[end - 1]) and self._says_nothing(whole[end - 1]):
            end -= 1
        return end

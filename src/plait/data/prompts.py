"""From rows to prompts: template, chat template, token ids, length check; and the stream that a run asks, step by step.

Torch-free: the tokenizer comes in as an object of Transformers' interface.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from plait.data.chat import Ids, Tokenizer, rendered_whole
from plait.data.formats import Messages, Row
from plait.data.records import Prompt
from plait.data.settings import DataSettings, OverlongPrompts
from plait.data.sources import Source
from plait.errors import DataError
from plait.policy.packing import common_length


class PromptEncoder:
    """Renders a row as the model reads it, and tokenises it, with a BOS token exactly where the tokenizer wants one.

    A text prompt goes into `data.prompt_template`, and is then sent as one user message or raw (`data.chat_template`).
    Messages always go through the chat template, with its `tools` and `chat_template_kwargs` columns as in TRL.

    Raises:
        DataError: the settings do not fit the format of the source, or the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer, settings: DataSettings, *, conversational: bool) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        has_template = tokenizer.chat_template is not None
        if conversational and settings.prompt_template is not None:
            raise DataError("`data.prompt_template` goes around text prompts, but these are messages; remove it")
        if conversational and settings.chat_template is False:
            raise DataError("`data.chat_template` is false, but the prompts are messages; remove it, or give texts")
        self._chat = conversational or (has_template if settings.chat_template == "auto" else settings.chat_template)
        if self._chat and not has_template:
            raise DataError(
                "the tokenizer has no chat template, but "
                + ("the prompts are messages" if conversational else "`data.chat_template` is true")
                + "; take an instruction-tuned `model`, put a template into its folder (chat_template.jinja), or give "
                "texts with `data.chat_template: false`"
            )
        if settings.system_prompt is not None and not self._chat:
            raise DataError("`data.system_prompt` needs a chat template, but text prompts are sent raw; remove it")
        if settings.chat_template_kwargs:
            _check_told(tokenizer, settings.chat_template_kwargs, is_chat=bool(self._chat))
        if settings.examples and (conversational or not self._chat):
            raise DataError(
                "`data.examples` go before text prompts as turns of a chat, but "
                + (
                    "these are messages; write them there"
                    if conversational
                    else "the prompts are sent raw; remove them"
                )
            )
        self._ids = Ids(tokenizer)

    @property
    def is_chat(self) -> bool:
        """Whether prompts go through the chat template."""
        return bool(self._chat)

    def render(self, row: Row, remedy: str | None = None) -> str:
        """The text that the model reads, up to where its response begins.

        Args:
            remedy: what to change where the chat template refuses it; None: where the row comes from.

        Raises:
            DataError: the prompt is empty, or the chat template raises on these messages, or leaves out tools.
        """
        if _says_nothing(row.prompt):
            raise DataError(f"{row.place}: the prompt is empty; remove the row from `data.source`")
        messages = self.messages(row.prompt, row.place)
        if messages is None:
            assert isinstance(row.prompt, str), "messages are never sent raw"
            return self.around(row.prompt)
        # A last message of the assistant is one that the response goes on from.
        goes_on = messages[-1]["role"] == "assistant"
        return rendered_whole(
            self._tokenizer, messages, row, remedy=remedy or self.remedy, begin_answer=not goes_on, go_on=goes_on
        )

    def asked(self, prompt: Prompt) -> str | Messages:
        """A prompt as it stood in the data."""
        return prompt.columns["prompt"]

    def written(self, own: Prompt, asked: str | Messages, place: str) -> Prompt:
        """What a function has written to be read in place of a prompt, which becomes tokens as that did.

        Args:
            place: what wrote it and for what, for messages.

        Raises:
            DataError: as `render`; or messages are to be sent raw.
        """
        if not self._chat and not isinstance(asked, str):
            raise DataError(
                f"{place}: the prompts of the run are texts that are sent raw, but this is messages; return a text"
            )
        row = Row({**own.columns, "prompt": asked}, place)
        return self.prompt(row, own.uid, own.source, "what it returns")

    def prompt(self, row: Row, uid: int, source: str, remedy: str | None = None) -> Prompt:
        """A row as prompt instance `uid`, of the source that has this label. Raises DataError as `render`."""
        text = self.render(row, remedy)
        messages = self.messages(row.prompt, row.place)
        asked = tuple(messages or [{"role": "user", "content": text}])
        return Prompt(uid, text, self.token_ids(text), row.columns, source, self.is_chat, asked)

    def messages(self, prompt: str | Messages, place: str) -> Messages | None:
        """What goes into the chat template; None where a text is sent raw.

        Raises:
            DataError: there are two system messages.
        """
        if not isinstance(prompt, str):
            messages = list(prompt)
        elif not self._chat:
            return None
        else:
            turns = [(self.around(question), answer) for question, answer in self._settings.examples]
            messages = [
                message
                for question, answer in turns
                for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
            ]
            messages.append({"role": "user", "content": self.around(prompt)})
        if self._settings.system_prompt is not None:
            if messages and messages[0]["role"] == "system":
                raise DataError(f"{place}: the prompt has a system message; remove it or `data.system_prompt`")
            messages.insert(0, {"role": "system", "content": self._settings.system_prompt})
        return messages

    @property
    def remedy(self) -> str:
        """What to change where the chat template refuses a row."""
        return "`data.source`" if self._settings.system_prompt is None else "`data.system_prompt`, or `data.source`"

    def around(self, question: str) -> str:
        """A text prompt in `data.prompt_template`."""
        template = self._settings.prompt_template
        return question if template is None else template.replace("{question}", question)

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a rendered text. A chat template writes its own BOS; raw text gets one if the tokenizer adds one."""
        return self._ids(text, chat=self._chat)


def _check_told(tokenizer: Tokenizer, told: Collection[str], *, is_chat: bool) -> None:
    """Raises DataError where the chat template reads nothing of one of these names."""
    if not is_chat:
        raise DataError("`data.chat_template_kwargs` needs a chat template, but texts are sent raw; remove it")
    for name in told:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise DataError(
                f"`data.chat_template_kwargs` has `{name}`, which the chat template of the model does not read; remove "
                "it, or correct the name"
            )


def _says_nothing(prompt: str | Messages) -> bool:
    if isinstance(prompt, str):
        return not prompt
    return not any(message.get("content") or message.get("tool_calls") for message in prompt)


@dataclass(frozen=True)
class PromptSet:
    """The rows of a source that fit the length limit, each ready to be asked."""

    source: Source
    encoder: PromptEncoder
    kept: tuple[int, ...]
    """Indices of rows of the source."""
    lengths: tuple[int, ...]
    """Tokens of each kept row."""
    num_dropped: int
    root: tuple[int, ...] = ()
    """Token ids that all kept rows begin with, each of which has one more at least."""

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest of the kept rows."""
        return max(self.lengths)

    @property
    def num_going_on(self) -> int:
        """Kept rows whose last message is the assistant's, which the response goes on from."""
        prompts = (self.source[index].prompt for index in self.kept)
        return sum(not isinstance(prompt, str) and prompt[-1]["role"] == "assistant" for prompt in prompts)

    def prompt(self, index: int, uid: int) -> Prompt:
        """The `index`-th kept row as prompt instance `uid`."""
        return self.encoder.prompt(self.source[self.kept[index]], uid, self.source.label)


def prompt_set(source: Source, tokenizer: Tokenizer, settings: DataSettings, max_prompt_tokens: int) -> PromptSet:
    """Render and measure every row of `source`.

    Args:
        max_prompt_tokens: the limit in force: `data.max_prompt_tokens`, or what the model's positions leave.

    Raises:
        DataError: a prompt is over the limit and `data.overlong_prompts` is fail, or all are; a prompt is empty.
    """
    if source.raw and settings.chat_template == "auto":
        settings = settings.model_copy(update={"chat_template": False})
    encoder = PromptEncoder(tokenizer, settings, conversational=source.conversational)
    source = source.told(settings.chat_template_kwargs)
    lengths: list[int] = []
    root: tuple[int, ...] | None = None
    for row in source.rows:
        token_ids = encoder.token_ids(encoder.render(row))
        lengths.append(len(token_ids))
        if len(token_ids) <= max_prompt_tokens:
            own = token_ids[:-1]
            root = own if root is None else root[: common_length([root, own])]
    for row, length in zip(source.rows, lengths, strict=True):
        if length == 0:
            empty = "the chat template of the model writes nothing for it" if encoder.is_chat else "the prompt is empty"
            raise DataError(f"{row.place}: {empty}; remove the row from `data.source`")
    over = [index for index, length in enumerate(lengths) if length > max_prompt_tokens]
    if over and (settings.overlong_prompts is OverlongPrompts.FAIL or len(over) == len(lengths)):
        first = over[0]
        raise DataError(
            f"{len(over)} of {len(lengths)} prompts are longer than {max_prompt_tokens} tokens: "
            f"{source[first].place} has {lengths[first]}, the longest {max(lengths)}; raise `data.max_prompt_tokens` "
            "(the model's positions less `sampling.max_response_tokens` bound it), or "
            + ("give shorter ones" if len(over) == len(lengths) else "set `data.overlong_prompts: drop`")
        )
    kept = tuple(index for index, length in enumerate(lengths) if length <= max_prompt_tokens)
    return PromptSet(source, encoder, kept, tuple(lengths[index] for index in kept), len(over), root or ())


def evaluation_prompts(prompts: PromptSet, first_uid: int) -> list[Prompt]:
    """Every held-out prompt once, in the order of its source; uids from `first_uid` on."""
    return [prompts.prompt(index, first_uid + index) for index in range(len(prompts))]

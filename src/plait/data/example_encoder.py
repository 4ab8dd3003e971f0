"""Examples and pairs as token ids, split into prompt and response."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from plait.data.assistant_turns import Rewritten, Spoken, SpokenFinder
from plait.data.chat import EndingTokenizer, Ids, render, rendered_whole, shared_prefix
from plait.data.formats import Messages, Parts, Row, RowKind, parts_of
from plait.data.prompts import PromptEncoder
from plait.data.records import Prompt
from plait.data.settings import DataSettings
from plait.data.sources import Source
from plait.errors import DataError
from plait.policy.packing import GroupTokens


class Response(NamedTuple):
    token_ids: tuple[int, ...]
    trained: tuple[float, ...]
    text: str


class Encoded(NamedTuple):
    """A row in tokens. Prompt and responses put together are what the whole text tokenises to: where the end of the
    prompt is tokenised differently before a response (a token over the boundary, a template that opens an answer in
    another way than it writes one), the response begins where they part."""

    prompt_text: str
    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...]

    @property
    def tokens(self) -> GroupTokens:
        return GroupTokens(len(self.prompt_ids), tuple(len(response.token_ids) for response in self.responses))


class ExampleEncoder:
    """Tokenises rows of examples or pairs.

    Texts are sent raw and end with the EOS token, as in TRL; with `data.chat_template: true` the prompt is a user
    message (after `data.system_prompt` and `data.examples`) and the completion the assistant's. Messages go through the
    chat template; only turns of the assistant are learnt, each with the token that closes it.

    Raises:
        DataError: the settings do not fit the format of the source, or the tokenizer lacks a chat template or an EOS.
    """

    def __init__(self, tokenizer: EndingTokenizer, settings: DataSettings, source: Source) -> None:
        assert source.kind is not RowKind.PROMPTS, f"`{source.name}` holds prompts, not examples or pairs"
        self._kind = source.kind
        self._tokenizer = tokenizer
        self._ids = Ids(tokenizer)
        first = parts_of(source[0].columns, source.kind, source[0].place)
        self._chat = first.conversational or settings.chat_template is True
        if first.prompt is None:
            for key, is_set in (
                ("chat_template", settings.chat_template is True),
                ("prompt_template", settings.prompt_template is not None),
                ("system_prompt", settings.system_prompt is not None),
                ("examples", bool(settings.examples)),
                ("chat_template_kwargs", bool(settings.chat_template_kwargs)),
            ):
                if is_set:
                    raise DataError(f"`data.{key}` is about prompts, but rows of `text` have none; remove it")
        raw = settings if self._chat else settings.model_copy(update={"chat_template": False})
        self._prompts = PromptEncoder(tokenizer, raw, conversational=first.conversational)
        if not self._chat and tokenizer.eos_token is None:
            raise DataError(
                "the tokenizer has no EOS token to end texts with; name one (`eos_token` of tokenizer_config.json), "
                "give messages, or another `model`"
            )
        self._spoken = SpokenFinder(tokenizer, self._ids)

    @property
    def is_chat(self) -> bool:
        """Whether rows go through the chat template."""
        return self._chat

    def encode(self, row: Row) -> Encoded:
        """
        Raises:
            DataError: no prompt token is left to predict the first response token, or the template writes a turn
                differently once others follow.
        """
        parts = parts_of(row.columns, self._kind, row.place)
        if parts.prompt is None:
            return self._whole_text(parts, row)
        messages = self._prompts.messages(parts.prompt, row.place)
        encoded = self._text(parts, row) if messages is None else self._conversation(messages, parts, row)
        if not encoded.prompt_ids:
            fault = "is empty; begin it with a word"
            if isinstance(parts.prompt, str) and parts.prompt:  # a token over the boundary is of the response
                fault = "is one token with what follows it; make it longer, or end it with a line break"
            raise DataError(f"{row.place}: the prompt {fault}, or remove the row")
        for response in encoded.responses:
            assert any(response.trained), f"{row.place}: nothing is learnt"
        return encoded

    def asked(self, prompt: Prompt) -> str | Messages:
        """The prompt of an encoded row, as it stood in the data. Raises DataError: it has none."""
        parts = parts_of(prompt.columns, self._kind, prompt.title())
        if parts.prompt is None:
            raise DataError(
                f"{prompt.title()}: rows of `text` have no prompt that another one could take the place of; give them "
                "as `prompt` and `completion`"
            )
        return parts.prompt

    def written(self, own: Prompt, asked: str | Messages, place: str) -> Prompt:
        """What a function has written to be read before the responses of an encoded row, in place of their prompt: it
        becomes tokens as that did. Where responses begin before the end of the prompt's text (see `Encoded`), the new
        one has to end as that does.

        Args:
            place: what wrote it and for what, for messages.

        Raises:
            DataError: the chat template refuses it, it ends otherwise, or messages are to be sent raw.
        """
        row = Row(dict(own.columns), place)
        messages = self._prompts.messages(asked, place) if isinstance(asked, str) or self._chat else None
        if messages is None:
            if not isinstance(asked, str):
                raise DataError(
                    f"{place}: the prompts are texts that are sent raw, but this is messages; return a text"
                )
            text = self._prompts.around(asked)
        else:
            answers = parts_of(own.columns, self._kind, place).completions
            at_once = all(isinstance(answer, str) or answer[0]["role"] == "assistant" for answer in answers)
            text = rendered_whole(self._tokenizer, messages, row, remedy="what it returns", begin_answer=at_once)
        is_chat = messages is not None
        ids, own_ids = self._ids(text, chat=is_chat), self._ids(own.text, chat=is_chat)
        if end := own_ids[len(own.token_ids) :]:
            if ids[-len(end) :] != end:
                raise DataError(
                    f"{place}: the given response begins within {self._tokenizer.decode(list(end))!r}, with which its "
                    "prompt ends as text; return one that ends so"
                )
            ids = ids[: -len(end)]
        return replace(own, text=text, token_ids=ids, columns={**own.columns, "prompt": asked})

    def encoded(self, row: Row) -> list[tuple[Row, Encoded]]:
        """The row encoded; a conversation whose earlier turns the template writes otherwise once others follow (Qwen3's
        drops their reasoning) as several rows, one for each part that it writes in one way, with what comes before as
        its prompt.

        Raises:
            DataError: as `encode`.
        """
        try:
            return [(row, self.encode(row))]
        except Rewritten:
            parts = parts_of(row.columns, self._kind, row.place)
            if self._kind is not RowKind.EXAMPLES or isinstance(parts.prompt, str):
                raise
            return [(part, self.encode(part)) for part in self._parted(row, parts)]

    def _parted(self, row: Row, parts: Parts) -> list[Row]:
        prompt, turns = parts.prompt, parts.completions[0]
        assert isinstance(prompt, list), "texts have no turns"
        assert isinstance(turns, list), "texts answer texts alone"
        messages = self._prompts.messages(prompt, row.place)
        assert messages is not None, "messages are never sent raw"
        of_settings = len(messages) - len(prompt)
        columns = {name: column for name, column in row.columns.items() if name != "messages"}
        return [
            replace(row, columns={**columns, "prompt": before[of_settings:], "completion": said})
            for before, said in self._spoken.parted(messages, turns, row, self._prompts.remedy)
        ]

    def _ended(self, text: str, row: Row) -> str:
        eos = self._tokenizer.eos_token
        assert eos is not None, "checked above"
        return text if not row.complete or text.endswith(eos) else text + eos

    def _whole_text(self, parts: Parts, row: Row) -> Encoded:
        # Nothing predicts the first token, so it is the prompt: TRL's shift of the labels leaves it out likewise.
        text = parts.completions[0]
        assert isinstance(text, str), "checked when read"
        ids = self._ids(self._ended(text, row), chat=False)
        if len(ids) < 2:
            raise DataError(f"{row.place}: `text` is a single token, so there is nothing to learn; remove the row")
        return Encoded("", ids[:1], (Response(ids[1:], (1.0,) * (len(ids) - 1), text),))

    def _text(self, parts: Parts, row: Row) -> Encoded:
        assert isinstance(parts.prompt, str), "messages are never sent raw"
        prompt = self._prompts.around(parts.prompt)
        wholes = [self._ids(prompt + self._ended(str(text), row), chat=False) for text in parts.completions]
        alone = self._ids(prompt, chat=False)
        cut = min(shared_prefix(alone, whole) for whole in wholes)
        responses = tuple(
            Response(whole[cut:], (1.0,) * (len(whole) - cut), str(text))
            for whole, text in zip(wholes, parts.completions, strict=True)
        )
        return Encoded(prompt, alone[:cut], responses)

    def _conversation(self, messages: Messages, parts: Parts, row: Row) -> Encoded:
        if not messages:
            raise DataError(
                f"{row.place}: the assistant speaks first, so nothing predicts its first word; set "
                "`data.system_prompt`, or begin with another message"
            )
        spoken = [self._find(messages, turns, row) for turns in parts.completions]
        at_once = all(answer.at_once for answer in spoken)
        opened = render(self._tokenizer, messages, row, remedy=self._prompts.remedy, begin_answer=at_once)
        alone = self._ids(opened, chat=True)
        cut = min(shared_prefix(alone, answer.token_ids) for answer in spoken)
        responses = []
        for answer in spoken:
            ids, trained = answer.after(cut)
            responses.append(Response(ids, trained, self._tokenizer.decode(ids, skip_special_tokens=True)))
        return Encoded(opened, alone[:cut], tuple(responses))

    def _find(self, messages: Messages, turns: str | Messages, row: Row) -> Spoken:
        answer: Messages = [{"role": "assistant", "content": turns}] if isinstance(turns, str) else turns
        return self._spoken.find(messages, answer, row, self._prompts.remedy)

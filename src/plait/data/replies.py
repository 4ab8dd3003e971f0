"""What stands between two turns of the model, in tokens: the reply, and what the chat template writes around it.

What the model has drawn is never tokenised again. A reply adds what the template writes behind a turn of the assistant
when the reply follows it, up to where the next turn begins. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.data.chat import EndingTokenizer, render, shared_prefix
from plait.data.formats import Row
from plait.data.records import Prompt, Sample
from plait.errors import DataError

_ASKED, _SAID, _REPLIED = "Do you see?", "Yes, I see.", "seven"
"""The conversation that a template is tried with."""


class ReplyEncoder:
    """Writes replies as the model reads them.

    Args:
        vocabulary: tokens that the model has an embedding for.
        replier: the key that says who replies.
    """

    def __init__(self, tokenizer: EndingTokenizer, vocabulary: int, replier: str = "turns.reply") -> None:
        self._replier = replier
        self._remedy = f"what `{replier}` returns" if replier == "turns.reply" else f"`{replier}`"
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._written: set[str] = set()
        """Roles that the template writes."""

    def turn(self, sample: Sample) -> dict[str, str]:
        """The last turn of a sample, as a message."""
        return {"role": "assistant", "content": self._text(sample, skip_special_tokens=True)}

    def token_ids(
        self, sample: Sample, messages: Sequence[Mapping[str, Any]], stop: Sequence[str] = ()
    ) -> tuple[int, ...]:
        """The tokens behind the last turn of a sample, up to where its next one begins. A turn that ended with a
        special token is closed; one that ended with a stop string, or with a stop token that is text (`</tool_call>`,
        for many models), is closed as the template closes turns.

        Args:
            stop: the strings that end a turn.

        Raises:
            DataError: the chat template refuses the messages, or does not show them; or the tokenizer writes a token
                that the model does not have.
        """
        if sample.prompt.is_chat:
            between, closing = self._between(sample.prompt, messages)
            ids = self._ids(between)
            ids = ids[self._num_said(sample, ids, closing, stop) :]
        else:
            ids = self._ids("".join(message["content"] for message in messages))
        if max(ids, default=0) >= self._vocabulary:
            raise DataError(
                f"{sample.prompt.title()}: the tokenizer writes token {max(ids)} for a reply, but the model has "
                f"only {self._vocabulary}; change {self._remedy}, or give the model its own tokenizer"
            )
        return ids

    def _num_said(self, sample: Sample, ids: tuple[int, ...], closing: str, stop: Sequence[str]) -> int:
        """How many of the first tokens that the template writes behind a turn the turn has in itself: those that close
        it, up to the last one that was drawn."""
        if not closing.strip():  # the tokens that open turns end them, too
            return int(ids[:1] == sample.token_ids[-1:])
        closes = ids[: shared_prefix(ids, self._ids(closing))]
        if any(string in self._text(sample) for string in stop):  # its last token may stand in what closes by chance
            said = self._said(sample)
            return max((n for n in range(1, len(closes) + 1) if said[-n:] == closes[:n]), default=0)
        drawn = [number for number, token in enumerate(closes, 1) if token in sample.token_ids[-1:]]
        if drawn:
            return drawn[-1]
        is_text = bool(self._tokenizer.decode(list(sample.token_ids[-1:]), skip_special_tokens=True))
        return int(not is_text)  # another special token stands in the place of the one that closes

    def _between(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """What the template writes between two turns; and behind one that is the last."""
        row = Row(dict(prompt.columns), f"`{self._replier}`, {prompt.title()}")
        system = [] if prompt.system is None else [prompt.system]
        told, said = "".join(message["content"] for message in system).strip(), _SAID
        while said in told:
            said += f" {_SAID}"
        begun = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": said}]

        def written(conversation: Sequence[Mapping[str, Any]], *, begin_answer: bool) -> str:
            messages = [dict(message) for message in conversation]
            text = render(self._tokenizer, messages, row, remedy=self._remedy, begin_answer=begin_answer)
            return text.partition(said)[2]

        def behind(replies: Sequence[Mapping[str, Any]], *, begin_answer: bool) -> str:
            """The system message may say how answers open. Some templates write it where the last user speaks, when the
            model has read it already."""
            text = written([*begun, *replies], begin_answer=begin_answer)
            own = written([*system, *begun, *replies], begin_answer=begin_answer) if system else text
            return text if told and own.count(told) > text.count(told) else own

        for role in {message["role"] for message in messages} - self._written:
            tried = behind([{**messages[0], "role": role, "content": _REPLIED}], begin_answer=True)
            if _REPLIED not in tried:
                raise DataError(
                    f"{row.place}: the chat template of the model does not write a reply of the role `{role}` behind "
                    "what the assistant says, so the model would not see it; change "
                    f"{self._remedy} (give another role), or give another `model`"
                )
            self._written.add(role)
        return behind(messages, begin_answer=True), behind([], begin_answer=False)

    def _said(self, sample: Sample) -> tuple[int, ...]:
        """The tokens of the last turn."""
        return sample.token_ids[sample.replies[-1].at if sample.replies else 0 :]

    def _text(self, sample: Sample, *, skip_special_tokens: bool = False) -> str:
        """The text of the last turn."""
        return self._tokenizer.decode(list(self._said(sample)), skip_special_tokens=skip_special_tokens)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

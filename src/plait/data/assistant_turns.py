"""Which part of a conversation the assistant wrote, in tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plait.data.chat import EndingTokenizer, Ids, render, rendered_whole, shared_prefix
from plait.data.formats import Messages, Row, is_learnt
from plait.errors import DataError


class Spoken(NamedTuple):
    """A conversation in tokens, and where the assistant speaks in it."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """Half-open ranges of tokens, one per turn of the assistant that is learnt, each with the token that closes it."""
    at_once: bool
    """Whether the first of the turns is one of these."""

    def after(self, cut: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens from `cut`, the end of the prompt, to the end of the last learnt turn; and 1.0 for each learnt one."""
        stop = self.spans[-1][1]
        trained = [0.0] * (stop - cut)
        first = (cut if self.at_once else self.spans[0][0], self.spans[0][1])
        for begin, end in (first, *self.spans[1:]):
            trained[begin - cut : end - cut] = [1.0] * (end - begin)
        return self.token_ids[cut:stop], tuple(trained)


class Rewritten(DataError):
    """A template writes what was said in another way once others follow."""


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
        """Where the assistant says what is to be learnt in `turns`, which follow `prompt`.

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
            if not is_learnt(messages[number]):
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
        return Spoken(whole, tuple(spans), is_learnt(turns[0]))

    def parted(self, prompt: Messages, turns: Messages, row: Row, remedy: str) -> list[tuple[Messages, Messages]]:
        """The same conversation as prompts and turns in which `find` finds what the assistant says: one, or as many as
        the template needs. In each the assistant reads what was said before as it would when it answers; and in each
        is something to learn.

        Raises:
            DataError: as `find`, where parting does not help.
        """
        parts: list[tuple[Messages, Messages]] = []
        while turns:
            start = 0
            try:
                self.find(prompt, turns, row, remedy)
            except Rewritten:
                start = self._written_alike(prompt, turns, row, remedy)
                self.find([*prompt, *turns[:start]], turns[start:], row, remedy)
            parts.append(([*prompt, *turns[:start]], turns[start:]))
            answers = [at for at, message in enumerate(turns[:start]) if message["role"] == "assistant"]
            turns = turns[: answers[-1] + 1] if answers else []
        return [(before, said) for before, said in reversed(parts) if any(map(is_learnt, said))]

    def _written_alike(self, prompt: Messages, turns: Messages, row: Row, remedy: str) -> int:
        """Where in `turns` the first answer stands from which on the template writes all as in the whole. Looked for
        from the last on: a template that rewrites any writes few alike.

        Raises:
            Rewritten: it writes even what stands before the last answer in another way.
        """
        messages, start = [*prompt, *turns], None
        whole = self._ids(rendered_whole(self._tokenizer, messages, row, remedy=remedy, begin_answer=False), chat=True)
        for at in reversed([at for at, message in enumerate(turns) if message["role"] == "assistant"]):
            try:
                for number in range(len(prompt) + at, min(len(prompt) + at + 2, len(messages))):
                    text = render(self._tokenizer, messages[:number], row, remedy=remedy, begin_answer=False)
                    self._reach(self._ids(text, chat=True), whole, number, row)
            except Rewritten:
                if start is None:
                    raise
                break
            start = at
        assert start is not None, "turns hold one of the assistant"
        return start

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
        raise Rewritten(
            f"{row.place}: the chat template of the model writes the first {number} turns of the conversation "
            "differently once others follow (it drops their reasoning, perhaps), so what the assistant wrote cannot be "
            "told; give each answer a row of its own in `data.source`, with the turns before it as `prompt`"
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

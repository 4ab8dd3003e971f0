"""Given completions as samples: examples to learn from and pairs to prefer, tokenised as TRL 1.16 does. Torch-free.

Which tokens are learnt is a column of its own, `trained`. What follows the last of them (the line break that a chat
template writes after a turn, a last question without an answer) is left out of the sample, so that a given completion
ends as a sampled one does: with the token that the model stops at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plait.data.chat import EndingTokenizer, Ids, Spoken, SpokenFinder, render, shared_prefix
from plait.data.formats import Messages, Parts, Row, RowKind, parts_of
from plait.data.mixture import Mixed
from plait.data.prompts import EVALUATION_UID, MixedOrder, PromptEncoder
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.settings import DataSettings, OverlongPrompts
from plait.data.sources import Source
from plait.errors import DataError

GIVEN_VERSION = -1
"""Policy version of a completion that no policy sampled."""


class Given(NamedTuple):
    """A sample whose response is given, and which of its tokens are learnt."""

    sample: Sample
    """Without log-probs; its finish reason is LENGTH where the source cut the completion."""
    trained: tuple[float, ...]
    """One per token of the response: 1.0 where it is to be learnt, else 0.0."""

    @property
    def margin(self) -> float:
        """By how much the chosen one of its pair is better, as the row says; 0 where it does not."""
        return float(self.sample.prompt.columns.get("margin") or 0.0)


class Response(NamedTuple):
    token_ids: tuple[int, ...]
    trained: tuple[float, ...]
    text: str


class Encoded(NamedTuple):
    """A row in tokens. Prompt and responses put together are what the whole text tokenises to."""

    prompt_text: str
    prompt_ids: tuple[int, ...]
    responses: tuple[Response, ...]
    merged: bool
    """The end of the prompt is tokenised differently before a response (a token over the boundary, a template that
    opens an answer in another way than it writes one): the response begins where they part."""

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longer response."""
        return len(self.prompt_ids) + max(len(response.token_ids) for response in self.responses)


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
            for key, given in (
                ("chat_template", settings.chat_template is True),
                ("prompt_template", settings.prompt_template is not None),
                ("system_prompt", settings.system_prompt is not None),
                ("examples", bool(settings.examples)),
            ):
                if given:
                    raise DataError(f"`data.{key}` is about prompts, but rows of `text` have none; remove it")
        raw = settings if self._chat else settings.model_copy(update={"chat_template": False})
        self._prompts = PromptEncoder(tokenizer, raw, conversational=first.conversational)
        if not self._chat and tokenizer.eos_token is None:
            raise DataError("the tokenizer has no EOS token to end texts with; give messages, or another `model`")
        self._spoken = SpokenFinder(tokenizer, self._ids)

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
            raise DataError(f"{row.place}: the prompt is empty; begin it with a word, or remove the row")
        for response in encoded.responses:
            assert any(response.trained), f"{row.place}: nothing is learnt"
        return encoded

    def ends(self, encoded: Encoded) -> bool:
        """Whether every response ends with a token that a model can stop at."""
        return all(self._spoken.is_marker(response.token_ids[-1]) for response in encoded.responses)

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
        return Encoded("", ids[:1], (Response(ids[1:], (1.0,) * (len(ids) - 1), text),), merged=False)

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
        return Encoded(prompt, alone[:cut], responses, merged=cut < len(alone))

    def _conversation(self, messages: Messages, parts: Parts, row: Row) -> Encoded:
        if not messages:
            raise DataError(
                f"{row.place}: the assistant speaks first, so nothing predicts its first word; set "
                "`data.system_prompt`, or begin with another message"
            )
        spoken = [self._find(messages, turns, row) for turns in parts.completions]
        at_once = all(one.at_once for one in spoken)
        opened = render(self._tokenizer, messages, row, remedy=self._prompts.remedy, begin_answer=at_once)
        alone = self._ids(opened, chat=True)
        cut = min(shared_prefix(alone, one.token_ids) for one in spoken)
        responses = []
        for one in spoken:
            ids, trained = one.after(cut)
            responses.append(Response(ids, trained, self._tokenizer.decode(ids, skip_special_tokens=True)))
        return Encoded(opened, alone[:cut], tuple(responses), merged=cut < len(alone))

    def _find(self, messages: Messages, turns: str | Messages, row: Row) -> Spoken:
        said: Messages = [{"role": "assistant", "content": turns}] if isinstance(turns, str) else turns
        return self._spoken.find(messages, said, row, self._prompts.remedy)


@dataclass(frozen=True)
class ExampleSet:
    """The rows of a source of examples or pairs that fit the length limit, each ready to be learnt."""

    source: Source
    encoder: ExampleEncoder
    kept: tuple[int, ...]
    """Indices of rows of the source."""
    samples_per_row: int
    """1, or 2 for pairs."""
    longest_tokens: int
    """Prompt and response, of the kept rows."""
    num_dropped: int
    """Rows that were too long, or pairs of equal completions, with `data.overlong_prompts: drop`."""
    num_merged: int
    """Kept rows whose prompt does not end on a token boundary (see `Encoded`)."""
    num_unended: int
    """Kept rows with a completion whose last token is no marker, so that a model does not learn there to stop: the
    source cut it, or the chat template closes no last turn."""
    num_trained_tokens: int
    """Of the kept rows together."""

    def __len__(self) -> int:
        return len(self.kept)

    def given(self, index: int, uid: int) -> list[Given]:
        """The samples of the `index`-th kept row, of one prompt with that uid; of a pair: chosen, rejected."""
        row = self.source[self.kept[index]]
        encoded = self.encoder.encode(row)
        prompt = Prompt(uid, encoded.prompt_text, encoded.prompt_ids, row.columns, self.source.label)
        finish = FinishReason.STOP if row.complete else FinishReason.LENGTH
        return [
            Given(Sample(prompt, number, ids, (), text, finish, GIVEN_VERSION), trained)
            for number, (ids, trained, text) in enumerate(encoded.responses)
        ]


PairSet = ExampleSet
"""An ExampleSet with two samples per row, chosen and rejected."""


def example_set(source: Source, tokenizer: EndingTokenizer, settings: DataSettings, max_tokens: int) -> ExampleSet:
    """Tokenise and measure every row of `source`, which holds examples or pairs (`source.kind`).

    Args:
        max_tokens: the model's positions; `data.max_example_tokens` lowers the limit.

    Raises:
        DataError: a row is over the limit, or a pair's completions are equal, and `data.overlong_prompts` is fail; or
            no row is left; or a row cannot be tokenised (see `ExampleEncoder`).
    """
    max_tokens = min(max_tokens, settings.max_example_tokens or max_tokens)
    encoder = ExampleEncoder(tokenizer, settings, source)
    encoded = [encoder.encode(row) for row in source.rows]
    drop = settings.overlong_prompts is OverlongPrompts.DROP
    equal = {index for index, one in enumerate(encoded) if _is_equal_pair(one)}
    if equal and not drop:
        raise DataError(
            f"{source[min(equal)].place}: `chosen` and `rejected` are the same ({len(equal)} of {len(encoded)} pairs "
            "are so), so neither is preferred; remove such pairs, or set `data.overlong_prompts: drop`"
        )
    over = {index for index, one in enumerate(encoded) if _is_over(one, max_tokens, settings.max_prompt_tokens)}
    kept = tuple(index for index in range(len(encoded)) if index not in over and index not in equal)
    if over and (not drop or not kept):
        raise DataError(_too_long(source, encoded, sorted(over), max_tokens, settings, none_left=not kept))
    if not kept:
        raise DataError(f"`{source.name}`: `chosen` and `rejected` are the same in every pair; give another source")
    return ExampleSet(
        source,
        encoder,
        kept,
        len(encoded[kept[0]].responses),
        max(encoded[index].longest for index in kept),
        len(encoded) - len(kept),
        sum(encoded[index].merged for index in kept),
        sum(not encoder.ends(encoded[index]) for index in kept),
        sum(int(sum(response.trained)) for index in kept for response in encoded[index].responses),
    )


pair_set = example_set
"""The same for pairs: which it is stands in the source."""


def _is_equal_pair(encoded: Encoded) -> bool:
    return len(encoded.responses) == 2 and encoded.responses[0].token_ids == encoded.responses[1].token_ids


def _is_over(encoded: Encoded, max_tokens: int, max_prompt_tokens: int | None) -> bool:
    return encoded.longest > max_tokens or len(encoded.prompt_ids) > (max_prompt_tokens or max_tokens)


def _too_long(
    source: Source, encoded: Sequence[Encoded], over: Sequence[int], limit: int, settings: DataSettings, none_left: bool
) -> str:
    first, longest = encoded[over[0]], max(one.longest for one in encoded)
    what = f"longer than {limit} tokens"
    if settings.max_prompt_tokens is not None:
        what += f", or their prompts longer than {settings.max_prompt_tokens}"
    return (
        f"{len(over)} of {len(encoded)} {source.kind} are {what}: {source[over[0]].place} has {len(first.prompt_ids)} "
        f"tokens of prompt and {first.longest} in all, the longest {longest}; raise `data.max_example_tokens` (the "
        "model's positions bound it) or `data.max_prompt_tokens`, or "
        + ("give shorter ones" if none_left else "set `data.overlong_prompts: drop`")
    )


class ExampleStream:
    """The given samples of every step: a pure function of (sets, seed, instance), with nothing to save and restore.

    Instances and epochs are those of `PromptStream`: instance i takes place i mod n of epoch i div n.
    """

    def __init__(self, examples: Mixed[ExampleSet], *, seed: int, per_step: int) -> None:
        assert per_step >= 1, f"per_step must be at least 1, got {per_step}"
        self.examples = examples
        self.per_step = per_step
        self._order = MixedOrder(examples, seed=seed)

    def __len__(self) -> int:
        """Examples or pairs."""
        return len(self.examples)

    def samples(self, start: int, count: int) -> list[Given]:
        """Instances `start` … `start + count − 1`: one sample each, of a pair two (chosen, rejected) in a row."""
        places = enumerate(self._order.rows(start, count), start)
        return [one for uid, (source, row) in places for one in self.examples.sets[source].given(row, uid)]

    def step(self, step: int) -> list[Given]:
        """The batch of `step`."""
        return self.samples(step * self.per_step, self.per_step)

    def epoch(self, step: int) -> float:
        """Passes over the data made before `step`, a fraction included."""
        return step * self.per_step / len(self.examples)


def evaluation_samples(examples: ExampleSet, first_uid: int = EVALUATION_UID) -> list[Given]:
    """Every held-out example or pair once, in the order of its source; uids from `first_uid` on."""
    return [one for index in range(len(examples)) for one in examples.given(index, first_uid + index)]

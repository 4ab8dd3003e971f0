"""Given completions as samples: examples to learn from, pairs to prefer and labelled responses, tokenised as TRL 1.16
does. Torch-free.

Which tokens are learnt is a column of its own, `trained`. What follows the last of them (the line break that a chat
template writes after a turn, a last question without an answer) is left out of the sample, so that a given completion
ends as a sampled one does: with the token that the model stops at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from plait.data.chat import EndingTokenizer
from plait.data.example_encoder import Encoded, ExampleEncoder
from plait.data.mixture import Mixed
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.settings import DataSettings, OverlongPrompts
from plait.data.sources import Source
from plait.errors import DataError
from plait.policy.packing import GroupTokens, common_length

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

    @property
    def label(self) -> float:
        """1.0 where a labelled response is desirable, else 0.0."""
        return float(self.sample.prompt.columns["label"])


@dataclass(frozen=True)
class ExampleSet:
    """The rows of a source of examples, pairs or labelled responses that fit the length limit, each ready to be
    learnt."""

    source: Source
    """Conversations that the chat template does not write in one way are several rows of it."""
    encoder: ExampleEncoder
    kept: tuple[int, ...]
    """Indices of rows of the source."""
    lengths: tuple[GroupTokens, ...]
    """Tokens of each kept row."""
    num_dropped: int
    """Rows that were too long, or pairs of equal completions, with `data.overlong_prompts: drop`."""
    max_tokens: int
    """The length limit, of prompt and response."""
    num_parted: int
    """Rows of the data that are several here."""
    root: tuple[int, ...] = ()
    """Token ids that the prompts of all kept rows begin with, each of which has one more at least."""

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def longest_tokens(self) -> int:
        """Prompt and response, of the kept rows."""
        return max(row.longest for row in self.lengths)

    def given(self, index: int, uid: int) -> list[Given]:
        """The samples of the `index`-th kept row, of one prompt with that uid; of a pair: chosen, rejected."""
        row = self.source[self.kept[index]]
        encoded = self.encoder.encode(row)
        encoder, texts = self.encoder, (encoded.prompt_text, encoded.prompt_ids)
        prompt = Prompt(uid, *texts, row.columns, self.source.label, encoder.is_chat)
        finish = FinishReason.STOP if row.complete else FinishReason.LENGTH
        return [
            Given(Sample(prompt, number, ids, (), text, finish, GIVEN_VERSION), trained)
            for number, (ids, trained, text) in enumerate(encoded.responses)
        ]


def example_set(source: Source, tokenizer: EndingTokenizer, settings: DataSettings, max_tokens: int) -> ExampleSet:
    """Tokenise and measure every row of `source`, of any kind but prompts (`source.kind`).

    Args:
        max_tokens: the model's positions; `data.max_example_tokens` lowers the limit.

    Raises:
        DataError: a row is over the limit, or a pair's completions are equal, and `data.overlong_prompts` is fail; or
            no row is left; or a row cannot be tokenised (see `ExampleEncoder`).
    """
    max_tokens = min(max_tokens, settings.max_example_tokens or max_tokens)
    encoder = ExampleEncoder(tokenizer, settings, source)
    source = source.told(settings.chat_template_kwargs)
    of_rows = [encoder.encoded(row) for row in source.rows]
    source = replace(source, rows=tuple(row for parts in of_rows for row, _ in parts))
    encoded = [example for parts in of_rows for _, example in parts]
    drop = settings.overlong_prompts is OverlongPrompts.DROP
    equal = {index for index, example in enumerate(encoded) if _is_equal_pair(example)}
    if equal and not drop:
        raise DataError(
            f"{source[min(equal)].place}: `chosen` and `rejected` are the same ({len(equal)} of {len(encoded)} pairs "
            "are so), so neither is preferred; remove such pairs, or set `data.overlong_prompts: drop`"
        )
    over = {index for index, example in enumerate(encoded) if _is_over(example, max_tokens, settings.max_prompt_tokens)}
    kept = tuple(index for index in range(len(encoded)) if index not in over and index not in equal)
    if over and (not drop or not kept):
        raise DataError(_too_long(source, encoded, sorted(over), max_tokens, settings, none_left=not kept))
    if not kept:
        raise DataError(f"`{source.name}`: `chosen` and `rejected` are the same in every pair; give another source")
    lengths = tuple(encoded[index].tokens for index in kept)
    own = [encoded[index].prompt_ids[:-1] for index in kept]
    return ExampleSet(
        source,
        encoder,
        kept,
        lengths,
        len(encoded) - len(kept),
        max_tokens,
        num_parted=sum(len(parts) > 1 for parts in of_rows),
        root=own[0][: common_length(own)],
    )


def _is_equal_pair(encoded: Encoded) -> bool:
    return len(encoded.responses) == 2 and encoded.responses[0].token_ids == encoded.responses[1].token_ids


def _is_over(encoded: Encoded, max_tokens: int, max_prompt_tokens: int | None) -> bool:
    return encoded.tokens.longest > max_tokens or len(encoded.prompt_ids) > (max_prompt_tokens or max_tokens)


def _too_long(
    source: Source, encoded: Sequence[Encoded], over: Sequence[int], limit: int, settings: DataSettings, none_left: bool
) -> str:
    first, longest = encoded[over[0]].tokens, max(example.tokens.longest for example in encoded)
    what = f"longer than {limit} tokens"
    if settings.max_prompt_tokens is not None:
        what += f", or their prompts longer than {settings.max_prompt_tokens}"
    return (
        f"{len(over)} of {len(encoded)} {source.kind.noun} are {what}: {source[over[0]].place} has {first.prompt} "
        f"tokens of prompt and {first.longest} in all, the longest {longest}; raise `data.max_example_tokens` (the "
        "model's positions bound it) or `data.max_prompt_tokens`, or "
        + ("give shorter ones" if none_left else "set `data.overlong_prompts: drop`")
    )


def most_tokens(examples: Mixed[ExampleSet]) -> int:
    """The largest length limit of the sources."""
    return max(rows.max_tokens for rows in examples.sets)


def evaluation_samples(examples: ExampleSet, first_uid: int) -> list[Given]:
    """Every held-out example or pair once, in the order of its source; uids from `first_uid` on."""
    return [given for index in range(len(examples)) for given in examples.given(index, first_uid + index)]

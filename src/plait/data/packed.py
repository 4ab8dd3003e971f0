"""The packed batch: token ids of all samples in one row, without padding, each group's prompt once, and once what all
prompts begin with.

A row is a segment tree: its root, the tokens that all prompts begin with (none, where they are not told); the prompts,
each without the root; and the continuations of each prompt. Positions of a segment go on where the one before it in
the tree ends; a token sees those before it in its own segment and in the segments above, never a sibling.

Shapes: T tokens of the row, R response tokens that were drawn, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.data.supports import Supports


@dataclass(frozen=True)
class Span:
    """Half-open range of the packed row."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Group:
    """A prompt segment and the continuations that share it, adjacent in the row: prompt, then each response."""

    prompt: Span
    """Without the root of the row, never empty."""
    responses: tuple[Span, ...]

    @property
    def stop(self) -> int:
        return self.responses[-1].stop if self.responses else self.prompt.stop


@dataclass(frozen=True)
class PackedBatch:
    """See the top of the file. Tensors are int64 on one device unless they say otherwise."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    groups: tuple[Group, ...]
    root: Span = Span(0, 0)
    """What all prompts begin with, in front of the first group."""
    token_ids: Sequence[int] = ()
    """The same ids on the host, where `pack` has made it."""
    given: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Half-open ranges of each response, in row order, that were not drawn: what is said of response tokens is not said
    of them. Empty: all were drawn."""
    supports: Supports | None = None
    """What each of the R response tokens was drawn from; None: all from the whole vocabulary."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids_T.shape[0])

    @cached_property
    def response_lengths(self) -> tuple[int, ...]:
        """Tokens of each sample's response, in row order (groups in order, samples within)."""
        return tuple(span.length for group in self.groups for span in group.responses)

    @cached_property
    def _drawn(self) -> Tensor | None:
        """Which of the tokens of all responses, one after another, were drawn: their places [R] int64, on the host;
        None: all."""
        if not any(self.given):
            return None
        is_drawn = torch.ones(sum(self.response_lengths), dtype=torch.bool)
        at = 0
        for length, ranges in zip(self.response_lengths, self.given, strict=True):
            for start, stop in ranges:
                is_drawn[at + start : at + stop] = False
            at += length
        return is_drawn.nonzero()[:, 0]

    @cached_property
    def predict_R(self) -> Tensor:
        """For each response token the place in the row whose hidden state predicts it; [R] int64.

        The first token of every response of a group is predicted by the last prompt token, which they share.
        """
        return uploaded(self.predict_on_host_R, torch.int64, self.token_ids_T.device)

    @cached_property
    def predict_on_host_R(self) -> Tensor:
        """The same places, on the host."""
        places: list[Tensor] = []
        for group in self.groups:
            for span in group.responses:
                if span.length:
                    places.append(torch.tensor([group.prompt.stop - 1]))
                    places.append(torch.arange(span.start, span.stop - 1))
        all_places = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)
        return all_places if self._drawn is None else all_places[self._drawn]

    @cached_property
    def targets_R(self) -> Tensor:
        """The response tokens themselves, [R] int64."""
        spans = [self.token_ids_T[span.start : span.stop] for group in self.groups for span in group.responses]
        targets = torch.cat(spans) if spans else self.token_ids_T[:0]
        return targets if self._drawn is None else targets[uploaded(self._drawn, torch.int64, targets.device)]


def pack(
    groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
    device: torch.device | str = "cpu",
    *,
    root_tokens: int = 0,
    given: Sequence[Sequence[tuple[int, int]]] = (),
    supports: Supports | None = None,
) -> PackedBatch:
    """Pack (prompt token ids, [response token ids, …]) groups into one row.

    Args:
        root_tokens: of each prompt, which begin all of them and stand in the row once.
        given, supports: as of `PackedBatch`.

    Raises:
        AssertionError: a prompt has nothing but the root (nothing of its own would predict the first response token),
            or begins with other tokens.
    """
    root_ids = list(groups[0][0][:root_tokens]) if groups else []
    token_ids: list[int] = list(root_ids)
    position_ids: list[int] = list(range(len(root_ids)))
    packed: list[Group] = []
    for prompt_ids, responses in groups:
        assert len(prompt_ids) > root_tokens, f"a prompt needs at least one token behind its first {root_tokens}"
        assert list(prompt_ids[:root_tokens]) == root_ids, f"two prompts differ in their first {root_tokens} tokens"
        prompt = Span(len(token_ids), len(prompt_ids) - root_tokens)
        token_ids.extend(prompt_ids[root_tokens:])
        position_ids.extend(range(root_tokens, len(prompt_ids)))
        spans = []
        for response_ids in responses:
            spans.append(Span(len(token_ids), len(response_ids)))
            token_ids.extend(response_ids)
            position_ids.extend(range(len(prompt_ids), len(prompt_ids) + len(response_ids)))
        packed.append(Group(prompt, tuple(spans)))
    token_ids_T, position_ids_T = uploaded([token_ids, position_ids], torch.int64, device).unbind()
    root, all_given = Span(0, len(root_ids)), tuple(map(tuple, given))
    return PackedBatch(token_ids_T, position_ids_T, tuple(packed), root, token_ids, all_given, supports)

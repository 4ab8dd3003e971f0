"""The draws of a step: which samples draw how many tokens, with which noise and parameters, and which tokens count.

A drafted token counts if it is what the sample draws anyway. Noise is a function of the sample and of the token's place
in its response, so drafts change no token, only how many tokens a step gives.

Shapes: D tokens that are drawn: of each row, then one of each other sample. V vocabulary, W bytes that
have a bit for each of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.data.host_device import HostTokens, uploaded
from plait.data.supports import WHOLE, encoded, num_bit_bytes
from plait.generation.decode_batch import NO_DRAFTS, DecodeBatch, Drafts
from plait.generation.flight import Drawn, InFlight
from plait.generation.joint import Joint
from plait.generation.response import Response
from plait.generation.sampler import SamplingRows, sample_kept
from plait.kernels import noise
from plait.policy.step import Key, Start, StepPlan


@dataclass
class Draws:
    """Tokens that a step draws, perhaps on another rank."""

    samples: list[Response]
    """The samples that draw, in the order of the tokens; first those that are rows of the batch."""
    num_new: tuple[int, ...]
    """How many tokens each of these rows draws."""
    drafts: Drafts
    token_ids_D: Tensor | None
    """int64, where they are drawn; None: that is on another rank."""
    tokens: Callable[[], HostTokens]
    """Waits for the tokens and returns them."""
    supports: Callable[[], list[bytes]] | None = None
    """Waits for what each token was drawn from, as `Sample.supports` has it, and returns it; None: no sample keeps it.
    """
    is_followed: bool = False
    """Whether the rows of its samples have moved on already, before the host knew the tokens (`generation.overlap`)."""

    def of_live(self) -> Draws:
        """Those of samples that had not ended before, as far as is known by now: of the others, nothing counts."""
        places = [place for place, response in enumerate(self.samples) if response.finish_reason is None]
        if len(places) == len(self.samples):
            return self
        assert self.token_ids_D is not None, "a step that was launched ahead is this rank's alone"
        assert not self.drafts, "a step that was launched ahead has no drafts"
        index = uploaded(places, torch.int64, self.token_ids_D.device)

        def tokens() -> HostTokens:
            token_ids, logprobs = self.tokens()
            return [token_ids[place] for place in places], [logprobs[place] for place in places]

        told = self.supports
        supports = None if told is None else lambda: [kept for at, kept in enumerate(told()) if at in places]

        return replace(
            self,
            samples=[self.samples[place] for place in places],
            num_new=(1,) * sum(place < len(self.num_new) for place in places),
            token_ids_D=self.token_ids_D[index],
            tokens=tokens,
            supports=supports,
        )


class Drawing:
    """Draws the tokens of a step, and gives them to their samples and rows.

    Args:
        rows, flight: of the engine.
        joint: the ranks that step it.
        exact: draw each token in a call of its own, as sums over the vocabulary may be split by the number of rows.
    """

    def __init__(self, rows: DecodeBatch, flight: InFlight, tokenizer: Any, joint: Joint, *, exact: bool) -> None:
        self._rows, self._flight, self._tokenizer = rows, flight, tokenizer
        self._joint, self._exact = joint, exact

    def of_starts(self, starts: Sequence[Start]) -> Draws:
        """Draw the first tokens of samples whose prompt is computed."""
        logits_DV = torch.cat(self._flight.begin(starts))
        keys = [(start.uid, index) for start in starts for index in start.indices]
        return self._begun(logits_DV, keys, self._rows, (), NO_DRAFTS)

    def of_step(self, logits_DV: Tensor, rows: DecodeBatch, plan: StepPlan, drafts: Drafts) -> Draws:
        """Draw the tokens of a step, for its rows and then for its other samples.

        Args:
            rows: of the step, as they were computed.
        """
        return self._begun(logits_DV, plan.drawn, rows, plan.num_new, drafts)

    def _begun(
        self, logits_DV: Tensor, keys: Sequence[Key], rows: DecodeBatch, num_new: tuple[int, ...], drafts: Drafts
    ) -> Draws:
        samples = [self._flight.started[key] for key in keys]
        drawn = self._draw(logits_DV, rows, num_new, samples[len(num_new) :]) if self._joint.draws else None
        tokens, bits_DW = (None, None) if drawn is None else ((drawn[0], drawn[1]), drawn[2])
        told = self._joint.tell(tokens, len(logits_DV))
        supports = None
        if any(response.request.sampling.keeps for response in samples):
            num_drawn, vocab_size = logits_DV.shape
            bits = self._joint.tell_bits(bits_DW, num_drawn, num_bit_bytes(vocab_size))
            supports = lambda: encoded(bits(), vocab_size)
        return Draws(samples, num_new, drafts, None if tokens is None else tokens[0], told, supports)

    def end(self, draws: Draws) -> Drawn:
        """Wait for the tokens, and give them to the samples."""
        draws = draws.of_live()
        samples, drafts, num_rows = draws.samples, draws.drafts, len(draws.num_new)
        keys = [response.key for response in samples]
        token_ids, logprobs = draws.tokens()
        supports = None if draws.supports is None else draws.supports()
        kept = take(samples, drafts, token_ids, logprobs, self._tokenizer, supports)
        ended = {response.key: response for response in samples if response.finish_reason is not None}
        if draws.is_followed:
            self._rows.know(keys, token_ids)
            return Drawn(ended, sum(kept), [], {})
        rows = keys[:num_rows]
        if drafts or draws.token_ids_D is None:
            self._rows.advance(rows, [response.token_ids[-1] for response in samples[:num_rows]], kept[:num_rows])
        elif rows:
            self._rows.go_ahead(rows, draws.token_ids_D[:num_rows])
            self._rows.know(rows, token_ids[:num_rows])
        lengths = zip(keys, draws.num_new, kept, strict=False) if drafts else ()
        num_wrong = {key: new - count for key, new, count in lengths if new > count}
        begun = [key for key in keys[num_rows:] if key not in ended]
        return Drawn(ended, sum(kept), begun, num_wrong, sum(kept) - len(kept))

    def _draw(
        self, logits_DV: Tensor, rows: DecodeBatch, num_new: Sequence[int], others: Sequence[Response]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One token for each row of logits.

        Args:
            num_new: of each of `rows`, in their order, the tokens that it draws; empty: none of them draws.

        Returns:
            token_ids_D (int64), logprobs_D; and bits_DW, what each was drawn from, where a sample keeps that.
        """
        num_drawn, vocab_size = logits_DV.shape
        device = logits_DV.device
        columns: list[tuple[Tensor, ...]] = [rows.draws(num_new)] if num_new else []
        if others:
            numbers = [[s.noise_key for s in others], [len(s.token_ids) for s in others]]
            columns.append(uploaded(numbers, torch.int64, device).unbind(0))
        noise_keys_D, places_D = columns[0] if len(columns) == 1 else map(torch.cat, zip(*columns, strict=True))
        noise_D = noise.DrawNoise(noise_keys_D, places_D)
        if not self._exact and not others and num_drawn == len(num_new):
            return self._chosen(logits_DV, noise_D, rows.parameters(vocab_size))
        samplings = [s for s, count in zip(rows.samplings, num_new, strict=False) for _ in range(count)]
        samplings += [s.request.sampling for s in others]
        if not self._exact:
            return self._chosen(logits_DV, noise_D, SamplingRows.of(samplings, vocab_size, device))
        keeps = any(sampling.keeps for sampling in samplings)
        rows_of_each = [SamplingRows.of([sampling], vocab_size, device) for sampling in samplings]
        each = [
            self._chosen(logits_DV[i : i + 1], noise_D[i : i + 1], row, keeps=keeps)
            for i, row in enumerate(rows_of_each)
        ]
        token_ids, logprobs, bits = zip(*each, strict=True)
        return torch.cat(token_ids), torch.cat(logprobs), torch.cat(bits) if keeps else None

    def _chosen(
        self, logits_BV: Tensor, noise_B: noise.DrawNoise, rows: SamplingRows, *, keeps: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [B], log-probs [B] and bits [B, W], these last where a row keeps what it draws from, or all are told
        to by `keeps`."""
        if keeps or rows.keeps_B is not None:
            return sample_kept(logits_BV, noise_B, rows)
        return *self._joint.choose(logits_BV, noise_B, rows), None


def take(
    samples: Sequence[Response],
    drafts: Drafts,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    tokenizer: Any,
    supports: Sequence[bytes] | None,
) -> list[int]:
    """Give samples the drawn tokens that count; how many tokens each sample got.

    Args:
        token_ids, logprobs: drawn after the newest token of each sample and after each token of its draft.
        supports: what each was drawn from; None: the whole vocabulary.
    """
    if supports is None:
        supports = (WHOLE,) * len(token_ids)
    if not drafts:
        for response, token_id, logprob, support in zip(samples, token_ids, logprobs, supports, strict=True):
            response.append(token_id, logprob, tokenizer, support)
        return [1] * len(samples)
    drafted = accepted([response.key for response in samples], drafts, token_ids)
    return [
        response.extend(token_ids[start:stop], logprobs[start:stop], tokenizer, supports[start:stop])
        for response, (start, stop) in zip(samples, drafted, strict=True)
    ]


def accepted(keys: Sequence[Key], drafts: Drafts, token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """For each sample, the places start … stop − 1 of the tokens that count among all drawn ones: up to and including
    the first that differs from the draft."""
    start = 0
    for key in keys:
        draft = drafts.get(key, ())
        stop = start + 1
        for drafted in draft:
            if token_ids[stop - 1] != drafted:
                break
            stop += 1
        yield start, stop
        start += 1 + len(draft)
    assert start == len(token_ids), f"{len(token_ids)} tokens drawn, {start} expected"

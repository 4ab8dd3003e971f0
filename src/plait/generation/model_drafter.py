"""Guesses of a draft model: what it draws in the samples' place.

It draws with the noise that the sample itself draws with, at its temperature, top-k and top-p. The token with the
largest sum of log-probability and noise is the same in both models unless their probabilities differ by more than the
noise sets tokens apart: at temperature 1 that is right far more often than its likeliest token, and always where both
models are one.

It holds keys and values of its own in blocks like the engine's; samples whose prompts begin alike share theirs. What a
sample has said since it was guessed for last is computed first; where nothing was guessed for long, that is more. Who
finds no room is not guessed for, and nothing else depends on what is held here.

Shapes: B samples that are asked for, R of them that are guessed for, K tokens of a guess, V vocabulary, T tokens said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from plait.data.across import downloading, uploaded
from plait.generation.drafted_text import DraftedText
from plait.generation.pool import KVPool
from plait.generation.ragged import SHORT_ROWS, NewTokens
from plait.generation.sampler import SamplingRows, sample
from plait.kernels import noise
from plait.models.language_model import LanguageModel
from plait.policy.blocks import BLOCK_TOKENS, Blocks, num_blocks_for
from plait.speculation.drafter import Asked, Guesses, drafted_cells
from plait.speculation.pool import FloatArray, IntArray
from plait.speculation.step_cost import StepCost

MEASURED = (1, 1, 1, 8, 8, 64)
"""Tokens of the forwards by which it is found out what it takes."""


class ModelDrafter:
    """A CostlyDrafter over a model that speaks the tokens of the policy.

    Args:
        model: whole; its weights do not change.
        pool: of its keys and values.
        compute: (new tokens of samples, whether they are read) → logits [R, V] behind the last of each, if they are;
            fills the pool.
        vocabulary: tokens of the policy.
        num_blocks: of BLOCK_TOKENS tokens whose keys and values it holds at most.
        most_tokens: computed at a time.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: KVPool,
        compute: Callable[[Sequence[NewTokens], bool], Tensor | None],
        *,
        vocabulary: int,
        num_blocks: int,
        most_tokens: int,
    ) -> None:
        self.model = model
        self._most_tokens = most_tokens
        self._vocabulary = min(vocabulary, model.config.get_text_config().vocab_size)
        self._pool, self._num_blocks, self._compute = pool, num_blocks, compute
        self._blocks = Blocks(num_blocks)
        self._texts: dict[int, DraftedText] = {}
        self._cost = StepCost()

    @torch.no_grad()
    def measure(self) -> None:
        """Find out what it takes, on tokens of no sample: that has to be known before it is asked for the first time,
        and the first forward of all loads what the others need."""
        most = min(max(MEASURED), self.model.max_positions, self._num_blocks * BLOCK_TOKENS)
        table = self._blocks.take(num_blocks_for(most))
        for number, count in enumerate((1, *MEASURED)):
            new = [NewTokens([0] * min(count, most), 0, table)]
            began = time.perf_counter()
            self._computed(new, completes=True)
            if number > 0:
                self._took(new, time.perf_counter() - began)
        self._clear()

    @property
    def num_bytes(self) -> int:
        """See Drafter.num_bytes; keys and values, without the weights."""
        return self._pool.num_bytes

    def begin(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """See Drafter.begin."""
        self._texts[slot] = DraftedText.begun(prompt_ids, self._vocabulary)

    def say(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray, probs_T: FloatArray) -> None:
        """See Drafter.say."""
        start, token_ids = 0, token_ids_T.tolist()
        for slot, count in zip(slots_B.tolist(), counts_B.tolist(), strict=True):
            text = self._texts[slot]
            for token_id in token_ids[start : start + count]:
                text.say(token_id)
                text.is_known = text.is_known and token_id < self._vocabulary
            start += count

    def record(self, prompt_ids: tuple[int, ...], token_ids: IntArray, probs: FloatArray) -> None:
        """See Drafter.record: it learns from no text."""

    def end(self, slot: int) -> None:
        """See Drafter.end; with the last sample all keys and values go."""
        self._let_go(self._texts.pop(slot))
        if not self._texts:
            self._clear()

    def _clear(self) -> None:
        self._pool.clear()
        self._blocks = Blocks(self._num_blocks)

    def grow_old(self) -> None:
        """See Drafter.grow_old: it is of no policy."""

    def seconds_of(self, slots_B: IntArray) -> tuple[float, float]:
        """See CostlyDrafter.seconds_of."""
        texts = [self._texts[slot] for slot in slots_B.tolist()]
        num_behind, computed = 0, set[bytes]()
        for text in texts:
            num_behind += text.num_behind
            if not text.table:
                shared = max(len(self._blocks.find(text.names)), len(computed.intersection(text.names)))
                num_behind -= shared * BLOCK_TOKENS
                computed.update(text.names)
        context = sum(len(text.token_ids) for text in texts)
        counts = np.array([len(texts), len(texts) + num_behind])
        token_s, first_s = self._cost.seconds(counts, context).tolist()
        return first_s - token_s, token_s

    @torch.no_grad()
    def guess(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> Guesses:
        """See Drafter.guess."""
        guesses = Guesses.none(len(asked.slots_B), most)
        rows_R = self._with_room(asked, most)
        if not len(rows_R):
            return guesses
        texts = [self._texts[slot] for slot in asked.slots_B[rows_R].tolist()]
        for text in texts:
            text.rewind()
        self._catch_up(texts, most)
        survival_R = np.ones(len(rows_R))
        new = [NewTokens(text.token_ids[text.num_held :], text.num_held, text.table) for text in texts]
        for depth in range(most):
            asked_R = asked.part(rows_R)
            token_ids_R, confidence_R = self._drawn(new, asked_R, depth)
            for text in texts:
                text.num_held = len(text.token_ids)
            cells_R = drafted_cells(asked_R.greedy_B, depth, confidence_R)
            survival_R = survival_R * acceptance_C[cells_R]
            kept_R = survival_R >= least
            rows = rows_R[kept_R]
            guesses.token_ids_BK[rows, depth], guesses.cells_BK[rows, depth] = token_ids_R[kept_R], cells_R[kept_R]
            guesses.survival_BK[rows, depth], guesses.lengths_B[rows] = survival_R[kept_R], depth + 1
            kept_R &= asked_R.limits_B > depth + 1
            if depth + 1 == most or not kept_R.any():
                break
            rows_R, survival_R = rows_R[kept_R], survival_R[kept_R]
            texts = [text for text, is_kept in zip(texts, kept_R.tolist(), strict=True) if is_kept]
            new = []
            for text, token_id in zip(texts, token_ids_R[kept_R].tolist(), strict=True):
                text.ahead.append(token_id)
                new.append(NewTokens((token_id,), text.num_held + len(text.ahead) - 1, text.table))
        return guesses

    def _with_room(self, asked: Asked, most: int) -> IntArray:
        """[R]: those whose tokens, with a guess of so many, have room. Who is not asked for gives way."""
        slots, rows, free = asked.slots_B.tolist(), [], self._blocks.num_free
        mine = set(slots)
        others = [text for slot, text in self._texts.items() if text.table and slot not in mine]
        for row, (slot, limit) in enumerate(zip(slots, asked.limits_B.tolist(), strict=True)):
            text = self._texts[slot]
            length = len(text.token_ids) + most - 1
            if limit < 1 or not text.is_known or length > self.model.max_positions:
                continue
            needed = max(0, num_blocks_for(length) - len(text.table))  # for a longer guess it took more, and holds them
            while needed > free and others:
                before = self._blocks.num_free
                self._let_go(others.pop())
                free += self._blocks.num_free - before
            if needed <= free:
                rows.append(row)
                free -= needed
        return np.array(rows, np.int64)

    def _let_go(self, text: DraftedText) -> None:
        self._blocks.release(text.table)
        text.table, text.num_held = [], 0
        text.ahead.clear()

    def _catch_up(self, texts: Sequence[DraftedText], most: int) -> None:
        """Have all of these hold blocks for a guess, and keys and values of what they have said up to a few tokens,
        which are computed with the newest one."""
        left = list(texts)
        while left:
            chunks, held, waiting, room = [], [], [], self._most_tokens
            computing: set[bytes] = set()
            for text in left:
                if not text.table:
                    found = self._blocks.find(text.names)
                    if not computing.isdisjoint(text.names[len(found) :][:1]):
                        waiting.append(text)  # finds what is being computed
                        continue
                    self._share(text, found)
                text.table += self._blocks.take(
                    max(0, num_blocks_for(len(text.token_ids) + most - 1) - len(text.table))
                )
                if text.num_held < text.num_shared:
                    computing.add(text.names[text.num_held // BLOCK_TOKENS])
                elif text.num_behind < SHORT_ROWS:
                    continue
                if count := min(text.num_behind, room):
                    stop = text.num_held + count
                    chunks.append(NewTokens(text.token_ids[text.num_held : stop], text.num_held, text.table))
                    held.append((text, stop))
                    room -= count
                if count < text.num_behind:
                    waiting.append(text)
            if chunks:
                began = time.perf_counter()
                self._computed(chunks, completes=False)
                self._took(chunks, time.perf_counter() - began)
            for text, stop in held:
                text.num_held = stop
                self._name(text)
            left = waiting

    def _share(self, text: DraftedText, found: list[int]) -> None:
        """Hold what others hold of the beginning of its prompt."""
        text.table = found
        self._blocks.hold(text.table)
        text.num_held = len(text.table) * BLOCK_TOKENS

    def _name(self, text: DraftedText) -> None:
        """Whole blocks of its prompt that are computed may be found by others."""
        count = min(text.num_held, text.num_shared) // BLOCK_TOKENS
        for block, key in zip(text.table[:count], text.names, strict=False):
            self._blocks.name(block, key)

    def _drawn(self, new: Sequence[NewTokens], asked: Asked, depth: int) -> tuple[IntArray, FloatArray]:
        """Tokens [R] drawn behind these, and their probabilities [R]."""
        began, device = time.perf_counter(), self.model.device
        logits_RV = self._computed(new, completes=True)
        assert logits_RV is not None, "a chunk that completes is read"
        keys_R = uploaded(asked.keys_B.view(np.int64).tolist(), torch.int64, device)
        places_R = uploaded((asked.places_B + depth).tolist(), torch.int64, device)
        rows = SamplingRows.of(asked.samplings, self._vocabulary, device)
        drawn = sample(logits_RV[:, : self._vocabulary], noise.DrawNoise(keys_R, places_R), rows)
        token_ids, logprobs = downloading(*drawn)()
        self._took(new, time.perf_counter() - began)
        return np.array(token_ids, np.int64), np.exp(np.array(logprobs))

    def _computed(self, new: Sequence[NewTokens], *, completes: bool) -> Tensor | None:
        """Logits [R, V] behind the last of the new tokens of each, where they are read."""
        self._pool.reserve(self._blocks.num_touched, self._num_blocks)
        return self._compute(new, completes)

    def _took(self, new: Sequence[NewTokens], seconds: float) -> None:
        """A forward of these took so long."""
        num_rows = sum(len(tokens.token_ids) for tokens in new)
        self._cost.observe(num_rows, num_rows + sum(tokens.held for tokens in new), seconds)

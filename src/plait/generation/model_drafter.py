"""Drafts of a draft model: what it draws in the samples' place.

It draws with the noise that the sample itself draws with, at its temperature, top-k and top-p. The token with the
largest sum of log-probability and noise is the same in both models unless their probabilities differ by more than the
noise sets tokens apart: at temperature 1 that is right far more often than its likeliest token, and always where both
models are one.

It holds keys and values of its own in blocks like the engine's; samples whose prompts begin alike share theirs. What a
sample has said since it was drafted for last is computed first; where nothing was drafted for long, that is more. Who
finds no room is not drafted for, and nothing else depends on what is held here.

Shapes: B samples that are asked for, R of them that are drafted for, K tokens of a draft, V vocabulary, T tokens said.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from plait.generation.decode_batch import NO_DRAFTS, DecodeBatch, Drafts
from plait.generation.draft_chains import Chains
from plait.generation.draft_steps import DraftSteps
from plait.generation.drafted_text import DraftedText
from plait.generation.joint import Tokens
from plait.generation.ragged import SHORT_ROWS, NewTokens
from plait.generation.settings import DRAFT_MODEL_TOKENS
from plait.policy.blocks import BLOCK_TOKENS, num_blocks_for
from plait.speculation.drafter import Asked, DraftTokens
from plait.speculation.pool import FloatArray, IntArray


class ModelDrafter:
    """A CostlyDrafter over a model that speaks the tokens of the policy.

    Args:
        steps: of the model.
        most_tokens: computed at a time.
    """

    def __init__(self, steps: DraftSteps, *, most_tokens: int) -> None:
        self.steps, self._most_tokens = steps, most_tokens
        self._texts: dict[int, DraftedText] = {}

    @property
    def capturing_s(self) -> float:
        """See CostlyDrafter.capturing_s."""
        return self.steps.forward.capturing_s

    @property
    def num_bytes(self) -> int:
        """See Drafter.num_bytes; keys and values, without the weights."""
        return self.steps.pool.num_bytes

    def begin(self, slot: int, prompt_ids: tuple[int, ...]) -> None:
        """See Drafter.begin."""
        self._texts[slot] = DraftedText.begun(prompt_ids, self.steps.vocabulary)

    def say(self, slots_B: IntArray, counts_B: IntArray, token_ids_T: IntArray, probs_T: FloatArray) -> None:
        """See Drafter.say."""
        start, token_ids = 0, token_ids_T.tolist()
        for slot, count in zip(slots_B.tolist(), counts_B.tolist(), strict=True):
            text = self._texts[slot]
            for token_id in token_ids[start : start + count]:
                text.say(token_id)
                text.is_known = text.is_known and token_id < self.steps.vocabulary
            start += count

    def record(self, prompt_ids: tuple[int, ...], token_ids: IntArray, probs: FloatArray) -> None:
        """See Drafter.record: it learns from no text."""

    def end(self, slot: int) -> None:
        """See Drafter.end; with the last sample all keys and values go."""
        self._let_go(self._texts.pop(slot))
        if not self._texts:
            self.steps.clear()

    def grow_old(self) -> None:
        """See Drafter.grow_old: it is of no policy."""

    def seconds_of(self, slots_B: IntArray) -> tuple[float, float]:
        """See CostlyDrafter.seconds_of."""
        texts = [self._texts[slot] for slot in slots_B.tolist()]
        num_behind, computed = [], set[bytes]()
        for text in texts:
            num_behind.append(text.num_behind)
            if not text.table:
                shared = max(len(self.steps.blocks.find(text.names)), len(computed.intersection(text.names)))
                num_behind[-1] -= shared * BLOCK_TOKENS
                computed.update(text.names)
        seconds, context = self.steps.seconds, sum(len(text.token_ids) for text in texts)
        token_s = seconds.of_step(len(texts), context)
        few = [count for count in num_behind if count < SHORT_ROWS]  # computed with the newest tokens
        of_first = seconds.of_step if max(few, default=0) < DRAFT_MODEL_TOKENS else seconds.of_other
        catch_up_s = max(0.0, of_first(len(texts) + sum(few), context) - token_s)
        if before := sum(num_behind) - sum(few):
            catch_up_s += seconds.of_other(before, context)
        return catch_up_s, token_s

    @torch.no_grad()
    def propose(self, asked: Asked, most: int, acceptance_C: FloatArray, least: float) -> DraftTokens:
        """See Drafter.propose. A device that computes behind is waited for once, when all tokens are drawn."""
        rows_R = self._with_room(asked, most)
        drafted = asked.part(rows_R)
        chains = Chains(drafted, most, acceptance_C, least)
        if len(rows_R):
            texts = [self._texts[slot] for slot in drafted.slots_B.tolist()]
            for text in texts:
                text.rewind()
            self.steps.seconds.begin()
            self._catch_up(texts, most)
            self._draw(chains, texts, drafted)
        return chains.drafts.among(rows_R, len(asked.slots_B))

    def _with_room(self, asked: Asked, most: int) -> IntArray:
        """[R]: those whose tokens, with a draft of so many, have room. Who is not asked for gives way."""
        slots, rows, free = asked.slots_B.tolist(), [], self.steps.blocks.num_free
        mine = set(slots)
        others = [text for slot, text in self._texts.items() if text.table and slot not in mine]
        for row, (slot, limit) in enumerate(zip(slots, asked.limits_B.tolist(), strict=True)):
            text = self._texts[slot]
            length = len(text.token_ids) + most - 1
            if limit < 1 or not text.is_known or length > self.steps.forward.model.max_positions:
                continue
            needed = max(0, num_blocks_for(length) - len(text.table))  # for a longer draft it took more, and holds them
            while needed > free and others:
                before = self.steps.blocks.num_free
                self._let_go(others.pop())
                free += self.steps.blocks.num_free - before
            if needed <= free:
                rows.append(row)
                free -= needed
        return np.array(rows, np.int64)

    def _let_go(self, text: DraftedText) -> None:
        self.steps.blocks.release(text.table)
        text.table, text.num_held = [], 0
        text.ahead.clear()

    def _catch_up(self, texts: Sequence[DraftedText], most: int) -> None:
        """Have all of these hold blocks for a draft, and keys and values of what they have said up to a few tokens,
        which are computed with the newest one."""
        left = list(texts)
        while left:
            chunks, held, waiting, room = [], [], [], self._most_tokens
            computing: set[bytes] = set()
            for text in left:
                if not text.table:
                    found = self.steps.blocks.find(text.names)
                    if not computing.isdisjoint(text.names[len(found) :][:1]):
                        waiting.append(text)  # finds what is being computed
                        continue
                    self._share(text, found)
                text.table += self.steps.blocks.take(
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
                self.steps.fill(chunks)
            for text, stop in held:
                text.num_held = stop
                self._name(text)
            left = waiting

    def _share(self, text: DraftedText, found: list[int]) -> None:
        """Hold what others hold of the beginning of its prompt."""
        text.table = found
        self.steps.blocks.hold(text.table)
        text.num_held = len(text.table) * BLOCK_TOKENS

    def _name(self, text: DraftedText) -> None:
        """Whole blocks of its prompt that are computed may be found by others."""
        count = min(text.num_held, text.num_shared) // BLOCK_TOKENS
        for block, key in zip(text.table[:count], text.names, strict=False):
            self.steps.blocks.name(block, key)

    def _draw(self, chains: Chains, texts: Sequence[DraftedText], asked: Asked) -> None:
        """Draw the tokens of these chains, one behind another."""
        rows, behind = self._rows(texts, asked)
        keys, drawing_N = list(rows.keys), chains.going()
        lengths_R = np.array([len(text.token_ids) for text in texts])
        waiting: list[tuple[IntArray, Tokens]] = []
        while len(drawing_N):
            waiting.append((drawing_N, self.steps.draw(rows, behind, int(lengths_R[drawing_N].sum()))))
            chains.draw(drawing_N)
            lengths_R += 1
            if not (self.steps.is_ahead and len(chains.going())):
                chains.know([rows_N for rows_N, _ in waiting], *self.steps.read([drawn for _, drawn in waiting]))
                waiting.clear()
            going_N, behind = chains.going(), NO_DRAFTS
            if 0 < len(going_N) < len(drawing_N):
                rows.remove({keys[row] for row in set(drawing_N.tolist()).difference(going_N.tolist())})
            drawing_N = going_N
        for row, text in enumerate(texts):
            text.num_held, text.ahead = len(text.token_ids), chains.computed(row)

    def _rows(self, texts: Sequence[DraftedText], asked: Asked) -> tuple[DecodeBatch, Drafts]:
        """Rows of these samples, each of which begins with the first token that is not held; and the known tokens that
        stand behind that."""
        rows = DecodeBatch(len(texts), BLOCK_TOKENS, self.steps.device)
        keys = [(slot, 0) for slot in asked.slots_B.tolist()]
        numbers, behind = [], {}
        columns = (keys, texts, asked.keys_B.view(np.int64).tolist(), asked.places_B.tolist())
        for key, text, noise_key, place in zip(*columns, strict=True):
            first, *others = text.token_ids[text.num_held :]
            numbers.append((noise_key, first, text.num_held, place - len(others)))
            if others:
                behind[key] = others
        rows.append(keys, asked.samplings, [text.table for text in texts], numbers)
        return rows, behind

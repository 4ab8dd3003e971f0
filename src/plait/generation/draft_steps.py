"""Forwards of a draft model over a pool of its own, what is drawn behind them, and what they take.

A step draws a token behind each row, and that is computed next where it lies, as in the engine's own steps: the host
need not know it. Steps of one new token a sample, or of two where a whole draft was accepted, are those of decoding,
and may be replayed.

Shapes: B rows, D tokens that are drawn in some steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.data.host_device import computes_behind, downloading
from plait.generation.decode_batch import NO_DRAFTS, DecodeBatch, Drafts
from plait.generation.draft_seconds import DraftSeconds
from plait.generation.joint import Tokens
from plait.generation.pool import KVPool
from plait.generation.ragged import SHORT_ROWS, NewTokens
from plait.generation.sampler import sample
from plait.generation.sampling import Sampling
from plait.generation.settings import DRAFT_MODEL_TOKENS
from plait.kernels.noise import DrawNoise
from plait.policy.blocks import BLOCK_TOKENS, Blocks, num_blocks_for
from plait.speculation.pool import FloatArray, IntArray

if TYPE_CHECKING:
    from plait.generation.forward import Forward

MEASURED_STEPS, MEASURED_CHUNKS = (1, 1, 1, 1, 8, 8), (8, 8, 8, 64, 64)
"""Rows of the steps, and tokens of a sample that are caught up with, by which it is found out what they take. The first
of each kind loads what the others need, and does not count; of two that are alike the shorter one does, as one may be
compiled anew."""


class DraftSteps:
    """What a draft model computes.

    Args:
        forward: of the whole model over the pool; its weights do not change.
        pool: of its keys and values.
        vocabulary: tokens of the policy.
        num_blocks: of BLOCK_TOKENS tokens whose keys and values it holds at most.
        keep_memory: see `engine.Engine`.
    """

    def __init__(self, forward: Forward, pool: KVPool, *, vocabulary: int, num_blocks: int, keep_memory: bool) -> None:
        self.forward, self.pool, self.device = forward, pool, forward.model.device
        self.vocabulary = min(vocabulary, forward.model.config.get_text_config().vocab_size)
        """Tokens that both models have: others are not drawn."""
        self._num_blocks, self._keep_memory = num_blocks, keep_memory
        self.blocks = Blocks(num_blocks)
        self.is_ahead = computes_behind(self.device)
        """Whether the device goes on while the host does not know what was drawn."""
        self.seconds = DraftSeconds(self.device, lambda: forward.capturing_s)

    @torch.no_grad()
    def measure(self) -> None:
        """Find out what they take, on tokens of no sample, in a few blocks: that has to be known before anything is
        drafted, and the first forward of all loads what the others need. Graphs are shown to be right on its rows: they
        have different tokens, and places of their own."""
        most = min(max(MEASURED_CHUNKS), self.forward.model.max_positions, self._num_blocks * BLOCK_TOKENS)
        self.blocks = Blocks(num_blocks_for(most))
        table = self.blocks.take(num_blocks_for(most))
        token_ids = [(1 + place) % self.vocabulary for place in range(most)]
        for counts, is_step in ((MEASURED_STEPS, True), (MEASURED_CHUNKS, False)):
            for number, count in enumerate(min(count, most) for count in counts):
                self.seconds.begin()
                if is_step or count <= SHORT_ROWS:
                    num_rows = count if is_step else 1
                    rows, keys = DecodeBatch(num_rows, BLOCK_TOKENS, self.device), [(row, 0) for row in range(num_rows)]
                    numbers = [(0, token_ids[row], row, 0) for row in range(num_rows)]
                    rows.append(keys, [Sampling()] * num_rows, [table] * num_rows, numbers)
                    self.draw(rows, NO_DRAFTS if is_step else {keys[0]: token_ids[1:count]}, count)
                else:
                    self.fill([NewTokens(token_ids[:count], 0, table)])
                if number > 0:
                    self.seconds.learn()
        self._clear(keep_memory=False)

    def clear(self) -> None:
        """Hold no keys and values; what was captured goes with their memory, unless that stays."""
        self._clear(keep_memory=self._keep_memory)

    def _clear(self, *, keep_memory: bool) -> None:
        self.pool.clear(keep_memory=keep_memory)
        if not keep_memory:
            self.forward.drop_steps()
        self.blocks = Blocks(self._num_blocks)

    def fill(self, new: Sequence[NewTokens]) -> None:
        """Have keys and values of these tokens; nothing is drawn."""
        self._reserve()
        self.forward.fill(new)
        num_tokens = sum(len(tokens.token_ids) for tokens in new)
        self.seconds.asked_for(num_tokens, num_tokens + sum(tokens.held for tokens in new), is_step=False)

    def draw(self, rows: DecodeBatch, behind: Drafts, context: int) -> Tokens:
        """Draw a token behind each row, which is the newest one from then on.

        Args:
            behind: row → known tokens behind its newest one, which are computed before.
            context: tokens that all rows see, the new ones included.

        Returns:
            token_ids_B, logprobs_B.
        """
        self._reserve()
        num_behind = [len(token_ids) for token_ids in behind.values()]
        logits_BV = self.forward.last_logits(rows, behind)[:, : self.vocabulary]
        if behind:
            rows.advance(list(behind), [token_ids[-1] for token_ids in behind.values()], num_behind)
        noise_B = DrawNoise(*rows.draws((1,) * len(rows)))
        token_ids_B, logprobs_B = sample(logits_BV, noise_B, rows.parameters(self.vocabulary))
        rows.go_ahead(rows.keys, token_ids_B)
        is_step = max(num_behind, default=0) < DRAFT_MODEL_TOKENS
        self.seconds.asked_for(len(rows) + sum(num_behind), context, is_step=is_step)
        return token_ids_B, logprobs_B

    def read(self, drawn: Sequence[Tokens]) -> tuple[IntArray, FloatArray]:
        """Wait for what these steps drew, once for all of them: token_ids_D, and their probabilities [D]."""
        token_ids_D, logprobs_D = drawn[0] if len(drawn) == 1 else map(torch.cat, zip(*drawn, strict=True))
        token_ids, logprobs = downloading(token_ids_D, logprobs_D)()
        self.seconds.learn()
        return np.array(token_ids, np.int64), np.exp(np.array(logprobs))

    def _reserve(self) -> None:
        self.pool.reserve(self.blocks.num_touched, self.blocks.num_blocks)

"""The engine's forward: new tokens of a step in, logits of those that are read out, the pool filled on the way.

Three ways compute the same up to rounding: the lowered forward where a model has one and its copy of the weights will
pay, the Transformers module else, and exact mode.

Shapes: R rows whose logits are read, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from plait.generation.exact import ExactForward
from plait.generation.lowered import Lowered, Refusal, lower
from plait.generation.pool import KVPool
from plait.generation.ragged import NewTokens, RaggedBatch, RaggedContext, ragged
from plait.generation.rows import Rows, with_chunks
from plait.models.cpu_linear import PackedLinears
from plait.models.language_model import LanguageModel

PACK_STEPS = 16
"""Tokens that a response may have, from which on the weights are packed when work begins: packing costs about what so
many steps gain by it."""


@dataclass(frozen=True)
class ChunkTokens:
    """A chunk of the step; the logits of its last token are read where it completes its sequence."""

    new: NewTokens
    completes: bool


class Forward:
    """Forwards of one model over one pool.

    Args:
        exact: the bits of a token do not depend on what else is computed (`generation.exact`).
    """

    def __init__(self, model: LanguageModel, pool: KVPool, *, exact: bool) -> None:
        self.model = model
        self._pool = pool
        self._exact = ExactForward(model, pool) if exact else None
        self._packed = PackedLinears(model.module)
        self._lowered: Lowered | Refusal | None = None
        """None: not tried yet. Where it is refused the module computes, with packed products."""
        self._decided = False
        """Whether the weights are to be packed."""

    @property
    def has_packed_weights(self) -> bool:
        """Whether a copy of the weights is held in another order."""
        return self._packed.has_copies or self._is_lowered

    @property
    def _is_lowered(self) -> bool:
        return isinstance(self._lowered, Lowered) and self._lowered.is_packed

    @property
    def not_lowered(self) -> str | None:
        """Why the Transformers module computes; None where a lowered forward does, once there are steps enough.

        The first question makes and proves the lowered forward.
        """
        if self._exact is not None:
            return "exact mode has a forward of its own"
        if self.model.part is not None:
            return "this rank has a part of the model"  # ranks of one layer have to meet in between
        if self._lowered is None:
            self._lowered = lower(self.model)
        return self._lowered.reason if isinstance(self._lowered, Refusal) else None

    def logits(
        self, rows: Rows, tokens_of_rows: Callable[[], Sequence[NewTokens]], chunks: Sequence[ChunkTokens]
    ) -> Tensor | None:
        """Logits [R, V]: of each row, then of the chunks that complete a sequence, in their order; None if R is 0."""
        if self._exact is not None:
            new = [*tokens_of_rows(), *(chunk.new for chunk in chunks)]
            return self._exact.logits(new, [True] * len(rows) + [chunk.completes for chunk in chunks])
        batch = rows.batch() if len(rows) else None
        if not chunks:
            return None if batch is None else self._logits(batch)
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].new.rank)
        more = ragged([chunks[i].new for i in order], self._pool.block_tokens, device=self.model.device)
        ends = dict(zip(order, more.starts_S1[1:].tolist(), strict=True))
        read = [ends[i] - 1 for i, chunk in enumerate(chunks) if chunk.completes]
        return self._logits(with_chunks(batch, more, read))

    def _logits(self, batch: RaggedBatch) -> Tensor | None:
        if self._is_lowered:
            assert isinstance(self._lowered, Lowered), "it is packed"
            hidden_RH = self._lowered.hidden(batch, self._pool)
            return self._lowered.logits(hidden_RH) if len(hidden_RH) else None
        context = RaggedContext(self._pool, batch)
        with self._packed.applied():
            hidden_TH = self.model.hidden(batch.token_ids_T, batch.position_ids_T, context, read=batch.read_R)
            hidden_RH = hidden_TH if batch.read_R is None else hidden_TH[batch.read_R]
            return self.model.logits(hidden_RH) if len(hidden_RH) else None

    def prepare(self, longest: Callable[[], int]) -> None:
        """Before a step: pack the weights, if it is not decided yet and there will be steps enough.

        Args:
            longest: says how many tokens a response may still have.
        """
        if self._decided or self._exact is not None or self.model.part is not None:
            return
        self._decided = True
        if longest() < PACK_STEPS:
            return
        if self.not_lowered is None:
            assert isinstance(self._lowered, Lowered), "it was made"
            self._lowered.pack()
        else:
            self._packed.pack()

    def work_added(self) -> None:
        """There is more to compute than was known: weights that were not worth packing may be now."""
        self._decided = self._packed.is_packed or self._is_lowered

    def drop(self, *, keep_memory: bool = False) -> None:
        """Give the packed copy back; before the weights change. Its memory may stay for the next one."""
        self._packed.drop()
        if isinstance(self._lowered, Lowered):
            self._lowered.drop(keep_memory=keep_memory)
        self._decided = False

"""Attention of one ragged step over the block pool.

Samples of few new tokens (decode, verification of drafts) come first and read their blocks through the kernel; longer
chunks follow, those without a held context first, and take dense products. So the cost grows with the tokens of the
batch and the contexts that they see, not with padding.

Shapes: T new tokens of the step, S samples, M columns of the block tables, K places looked at, Hq query heads, Hkv key
heads, D and E head sizes of keys and of values.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from plait.data.packed import Group, PackedBatch, Span
from plait.errors import CallError
from plait.generation.paged import PagedAttention, chunk_attention
from plait.generation.pool import KVPool, Places, context_of
from plait.generation.ragged import SHORT_ROWS, RaggedBatch
from plait.generation.step_segments import StepSegments
from plait.kernels.paged_call import PagedCall
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.recurrent import Mixer
from plait.models.compute.row_attention import RowPlan, row_plan


@dataclass(frozen=True)
class _ByKernel:
    """Samples that the kernel computes in one call: their rows, and what the call says of them."""

    rows: slice
    said: tuple[Any, ...]
    """tables_SM, starts_S1, held_S, ancestors."""
    lengths: tuple[int, int]
    """Most new tokens, and most keys with the new ones, that a sample has."""

    @classmethod
    def of(cls, batch: RaggedBatch, of_rows: range, of_samples: range) -> _ByKernel:
        """These samples, which have these rows."""
        first, stop = of_samples.start, of_samples.stop
        samples, rows = slice(first, stop), slice(of_rows.start, of_rows.stop)
        new, held = batch.num_new[samples], batch.num_held[samples]
        lengths = max(new), max(map(operator.add, new, held))
        if len(new) == len(batch.num_new):
            return cls(rows, (batch.tables_SM, batch.starts_S1, batch.held_S, batch.ancestors), lengths)
        starts_S1, trees = batch.starts_S1[first : stop + 1], batch.ancestors and batch.ancestors[samples]
        if trees is not None and all(tree is None for tree in trees):
            trees = None
        starts_S1 = starts_S1 - rows.start if first else starts_S1
        return cls(rows, (batch.tables_SM[samples], starts_S1, batch.held_S[samples], trees), lengths)


class RaggedContext:
    """An AttentionContext (models.attention) for one step: stores the new keys and values, then attends.

    Args:
        pool: has all blocks of the tables.
        batch: samples in the order of their rank.
        attention: of the samples of few rows.
        takes_chunks: of the longer ones, too; by a call of their own: it has programs for each sample, as many as its
            longest one needs.
    """

    def __init__(
        self, pool: KVPool, batch: RaggedBatch, attention: PagedAttention, *, takes_chunks: bool = False
    ) -> None:
        self.pool, self.batch = pool, batch
        self._attention = attention
        self._places = Places(batch.places_T, pool.block_tokens)
        self._plans: dict[int | None, RowPlan] = {}
        self._segments: StepSegments | None = None
        num_samples, num_short = len(batch.num_new), batch.num_short
        parts = batch.parts if takes_chunks else batch.parts[:1]
        self._by_kernel = [_ByKernel.of(batch, rows, samples) for rows, samples in parts if samples]
        self._starts = [0, *accumulate(batch.num_new)]
        self._num_done = num_done = num_samples if takes_chunks else num_short
        """Samples, the first ones, that the kernel computes."""
        self._fresh = next((s for s in range(num_done, num_samples) if batch.num_held[s]), num_samples)
        """First sample of the longer ones that hold a context."""
        assert all(batch.num_held[self._fresh :]), "samples that hold a context come last"

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `AttentionContext.attend`: [Hq, T, D], [Hkv, T, D] and [Hkv, T, E] to [T, Hq, E]."""
        blocks = self.pool.layer(layer, key, value)
        self._places.store(blocks, key, value)
        batch, num_done = self.batch, self._num_done
        rows_TH = query.transpose(0, 1)
        calls = [
            PagedCall(
                rows_TH[some.rows],
                blocks.key,
                blocks.value,
                *some.said,
                scale=form.scale,
                window=form.window,
                softcap=form.softcap,
                sinks=form.sinks,
                lengths=some.lengths,
            )
            for some in self._by_kernel
        ]
        if num_done == len(batch.num_new) and len(calls) == 1:
            return self._attention(calls[0])
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for some, call in zip(self._by_kernel, calls, strict=True):
            out[some.rows] = self._attention(call)
        if self._fresh > num_done:
            rows = slice(self._starts[num_done], self._starts[self._fresh])
            fresh = query[:, rows], key[:, rows], value[:, rows]
            if form.window not in self._plans:
                self._plans[form.window] = row_plan(self._fresh_prompts(), *fresh, form)
            out[rows] = self._plans[form.window].attend(*fresh, form)
        for sample in range(self._fresh, len(batch.num_new)):
            rows = slice(self._starts[sample], self._starts[sample + 1])
            if batch.ancestors is not None and batch.ancestors[sample] is not None:
                raise CallError(
                    f"a tree of {batch.num_new[sample]} tokens: expected at most {SHORT_ROWS} in this forward"
                )
            out[rows] = chunk_attention(query[:, rows], *self._context(sample, blocks.key, blocks.value), form)
        return out

    def mix(self, layer: int, hidden_TH: Tensor, mixer: Mixer) -> Tensor:
        """See `RecurrentContext.mix`: [T, H] → [T, H]."""
        if self._segments is None:
            self._segments = StepSegments(self.pool, self.batch)
        return self._segments.mix(layer, hidden_TH, mixer)

    def _fresh_prompts(self) -> PackedBatch:
        """The longer samples that hold nothing, as a packed batch of prompts."""
        first, last = self.batch.num_short, self._fresh
        offset = self._starts[first]
        rows = slice(offset, self._starts[last])
        spans = [Span(self._starts[s] - offset, self.batch.num_new[s]) for s in range(first, last)]
        groups = tuple(Group(span, ()) for span in spans)
        return PackedBatch(self.batch.token_ids_T[rows], self.batch.position_ids_T[rows], groups)

    def _context(self, sample: int, *blocks: Tensor) -> tuple[Tensor, ...]:
        """Held and new keys, values [Hkv, K, …] of one sample."""
        num_keys = self.batch.num_held[sample] + self.batch.num_new[sample]
        num_blocks = -(-num_keys // self.pool.block_tokens)
        ids_1M = self.batch.tables_SM[sample : sample + 1, :num_blocks].long()
        return tuple(context_of(tensor, ids_1M)[0, :, :num_keys] for tensor in blocks)

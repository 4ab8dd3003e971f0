"""Attention over the pieces of a packed row: one autograd node per layer, plain matrix products inside.

On CPU in bfloat16 two batched products and a float32 softmax take about half the time of the fused
scaled-dot-product kernel, forward and backward, at the sizes of a group (hundreds of tokens). One node for the whole
row also spares the backward of slicing and concatenation, which writes a full-size gradient per slice.

The query heads of one key head are viewed as further rows, so keys and values are never repeated.

Adjacent groups of equal shape have the same pieces, which are computed together, as long as the scores stay in a cache.

Shapes: T tokens of the row, n rows of a piece, K its keys, M = n · Hq / Hkv rows of one key head, Hq query heads, Hkv
key heads, g groups of a block, B = Hkv · g, D head size of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.data.packed import Group, PackedBatch, Span
from plait.kernels import fused_rows
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.pieces import NO_ROOT, Piece, cut
from plait.models.compute.visibility import places, sees
from plait.models.compute.widened import batched_product, scaled_batched_product
from plait.models.shape import KEPT_SCORES

BLOCK_SCORES = 1 << 19
"""Scores of all heads that are computed at once, where there are several groups to take: 1 MB in bfloat16."""

FULL_BIAS = 4
"""A bias is added to all scores of a piece whose keys are up to so many times its rows: adjacent numbers are added
faster than the last few of each row, 15 µs against 28 for 159 rows of 181 keys."""


@dataclass(frozen=True)
class Block:
    """The same piece of adjacent groups of equal shape, computed by the same batched products."""

    piece: Piece
    """The piece of the first group."""
    count: int
    """Groups."""
    stride: int
    """Tokens from one group to the next."""
    root: int
    """Tokens of the row's root: its keys are those of all groups."""
    bias: Tensor
    """[n, C], compute dtype, −inf where a key is hidden, else 0, over the last C keys (C = n, or all of K). Adding it
    takes a quarter to all of the time of filling by a mask."""


@dataclass(frozen=True)
class PackedPlan:
    """What every layer of one window does with the batch."""

    blocks: tuple[Block, ...]
    keep_probs: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `row_attention.RowPlan`: [Hq, T, D], [Hkv, T, D] and [Hkv, T, E] to [T, Hq, E]."""
        keep = self.keep_probs and form.softcap is None and torch.is_grad_enabled()
        way = _Way(self, form.scale, form.softcap, keep)
        return _PackedAttention.apply(query, key, value, form.sinks, way)  # type: ignore[no-any-return]


def plan(batch: PackedBatch, num_heads: int, window: int | None, dtype: torch.dtype) -> PackedPlan:
    """Pieces and biases of the groups, and whether the probabilities of a layer are few enough to be kept."""
    row, device = places(batch), batch.token_ids_T.device
    blocks = []
    for equal, root in [((Group(batch.root, ()),), NO_ROOT), *((e, batch.root) for e in _equal(batch.groups))]:
        first, *others = equal
        count, stride = 1 + len(others), sum(span.length for span in (first.prompt, *first.responses))
        for piece in cut([first], num_heads, window, root=root):
            rows = slice(piece.rows.start, piece.rows.stop)
            few_see_all = window is None and piece.num_keys > FULL_BIAS * piece.rows.length
            masked = [piece.rows] if few_see_all else [*piece.context, piece.rows]
            keys = np.concatenate([np.arange(span.start, span.stop) for span in masked])
            seen = torch.from_numpy(sees(row.of(np.s_[rows, None]), row.of(keys), window))
            hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
            bias = uploaded(hidden, dtype, device)
            most = max(1, BLOCK_SCORES // (num_heads * piece.num_scores))
            for start in range(0, count, most):
                shifted = _shifted(piece, start * stride, root)
                blocks.append(Block(shifted, min(most, count - start), stride, root.length, bias))
    num_scores = num_heads * sum(block.count * block.piece.num_scores for block in blocks)
    return PackedPlan(tuple(blocks), num_scores <= KEPT_SCORES)


def _equal(groups: Sequence[Group]) -> list[tuple[Group, ...]]:
    """Adjacent groups of equal shape."""

    def shape(group: Group) -> tuple[int, ...]:
        return group.prompt.length, *(span.length for span in group.responses)

    return [tuple(equal) for _, equal in groupby(groups, shape)]


def _shifted(piece: Piece, tokens: int, root: Span) -> Piece:
    def moved(span: Span) -> Span:
        return span if span.stop <= root.stop else Span(span.start + tokens, span.length)

    context = tuple(map(moved, piece.context))
    return Piece(Span(piece.rows.start + tokens, piece.rows.length), context)


@dataclass(frozen=True)
class _Way:
    """What an attention computes by, its tensors left out."""

    plan: PackedPlan
    scale: float
    softcap: float | None
    keep: bool
    """Keep the probabilities for the backward."""


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, way: _Way) -> Tensor:
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        kept = []
        for block in way.plan.blocks:
            rows, keys = _rows(query, block, key.shape[0]), _keys(key, block)
            column = _sink_column(sinks, block, key.shape[0])
            probs, sink_probs, _ = _probs(rows, keys, block.bias, column, way.scale, way.softcap)
            _put_rows(out.transpose(0, 1), batched_product(probs, _keys(value, block)), block)
            if way.keep:
                kept += [probs, sink_probs]
        ctx.way = way
        ctx.save_for_backward(query, key, value, sinks, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, *kept = ctx.saved_tensors
        scale, softcap = ctx.way.scale, ctx.way.softcap
        grad_out = grad_out.transpose(0, 1)
        grad_query = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_key = torch.zeros_like(key, dtype=wide)
        grad_value = torch.zeros_like(value, dtype=wide)
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        for index, block in enumerate(ctx.way.plan.blocks):
            rows, keys = _rows(query, block, key.shape[0]), _keys(key, block)
            column = _sink_column(sinks, block, key.shape[0])
            tanh = None
            if kept:
                probs, sink_probs = kept[2 * index : 2 * index + 2]
            else:
                probs, sink_probs, tanh = _probs(rows, keys, block.bias, column, scale, softcap)
            grad_rows = _rows(grad_out, block, key.shape[0])
            _add_keys(grad_value, batched_product(probs.transpose(1, 2), grad_rows), block)
            grad_probs = batched_product(grad_rows, _keys(value, block).transpose(1, 2))
            if grad_sinks is not None:
                weighted = sink_probs * (probs * grad_probs).sum(-1, dtype=wide)
                by_head = weighted.view(key.shape[0], block.count, -1, block.piece.rows.length)
                grad_sinks -= by_head.sum((1, 3)).view(-1)  # − p_sink · Σ_k p_k ∂p_k
            grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            if tanh is not None:
                grad_scores = (grad_scores * (1 - tanh * tanh)).to(probs.dtype)
            _put_rows(grad_query, scaled_batched_product(grad_scores, keys, scale), block)
            _add_keys(grad_key, scaled_batched_product(grad_scores.transpose(1, 2), rows, scale), block)
        if grad_sinks is not None:
            grad_sinks = grad_sinks.to(sinks.dtype)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None


def _probs(
    rows: Tensor, keys: Tensor, bias: Tensor, sinks: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Probabilities [B, M, K] in the dtype of `rows` (softmax in float32 or wider).

    Also those of the sinks [B, M] and the tanh of a softcap, both in float32 or wider.
    """
    scores, tanh = scaled_batched_product(rows, keys.transpose(1, 2), scale), None
    if softcap is None and sinks is None and fused_rows.takes(scores, bias):
        return fused_rows.probabilities_(scores, bias), None, None
    wide = torch.promote_types(scores.dtype, torch.float32)
    if softcap is not None:
        tanh = torch.tanh(scores.to(wide) / softcap)
        scores = tanh * softcap
    by_head = scores.view(scores.shape[0], -1, bias.shape[0], scores.shape[2])
    by_head[..., scores.shape[2] - bias.shape[1] :].add_(bias)
    if sinks is None:
        return scores.softmax(-1, dtype=wide).to(rows.dtype), None, tanh
    probs = torch.cat([scores.to(wide), sinks.to(wide)], dim=-1).softmax(-1)
    return probs[..., :-1].to(rows.dtype, memory_format=torch.contiguous_format), probs[..., -1].clone(), tanh


def _at(tensor: Tensor, span: Span, block: Block) -> Tensor:
    """The view [H, g, length, D] of [H, T, D] at the span of each group."""
    if block.count == 1:
        return tensor[:, None, span.start : span.stop]
    if span.stop <= block.root:
        return tensor[:, None, span.start : span.stop].expand(-1, block.count, -1, -1)
    stop = span.stop + (block.count - 1) * block.stride
    return tensor[:, span.start : stop].unfold(1, span.length, block.stride).transpose(2, 3)


def _rows(tensor: Tensor, block: Block, num_key_heads: int) -> Tensor:
    """[Hq, T, D] → [B, M, D]: the query heads of a key head one after another."""
    by_head = _at(tensor, block.piece.rows, block).unflatten(0, (num_key_heads, -1))
    return by_head.transpose(1, 2).reshape(num_key_heads * block.count, -1, tensor.shape[2])


def _put_rows(into: Tensor, rows: Tensor, block: Block) -> None:
    """The inverse of `_rows`, written into [Hq, T, D]."""
    num_key_heads = len(rows) // block.count
    by_head = rows.view(num_key_heads, block.count, -1, block.piece.rows.length, rows.shape[2])
    _at(into, block.piece.rows, block).unflatten(0, (num_key_heads, -1)).copy_(by_head.transpose(1, 2))


def _spans(block: Block) -> tuple[Span, ...]:
    """The keys of its piece, adjacent spans as one, but for the root of several groups, which has no stride."""
    spans: list[Span] = []
    for span in (*block.piece.context, block.piece.rows):
        if spans and spans[-1].stop == span.start and (block.count == 1 or span.start != block.root):
            spans[-1] = Span(spans[-1].start, spans[-1].length + span.length)
        else:
            spans.append(span)
    return tuple(spans)


def _keys(tensor: Tensor, block: Block) -> Tensor:
    """[Hkv, T, D] → [B, K, D] in the piece's order."""
    parts = [_at(tensor, span, block) for span in _spans(block)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).flatten(0, 1)


def _add_keys(into: Tensor, keys: Tensor, block: Block) -> None:
    """The transpose of `_keys`: adds [B, K, D] into [Hkv, T, D]."""
    by_group, start = keys.unflatten(0, (-1, block.count)), 0
    for span in _spans(block):
        part = by_group[:, :, start : start + span.length]
        if span.stop <= block.root and block.count > 1:
            into[:, span.start : span.stop].add_(part.sum(1, dtype=into.dtype))
        else:
            _at(into, span, block).add_(part)
        start += span.length


def _sink_column(sinks: Tensor | None, block: Block, num_key_heads: int) -> Tensor | None:
    """[Hq] → [B, M, 1]."""
    if sinks is None:
        return None
    column = sinks.view(num_key_heads, 1, -1, 1).expand(-1, block.count, -1, block.piece.rows.length)
    return column.reshape(num_key_heads * block.count, -1, 1)

"""Attention over the pieces of a packed row: one autograd node per layer, plain matrix products inside.

On CPU in bfloat16 two batched products and a float32 softmax take about half the time of the fused
scaled-dot-product kernel, forward and backward, at the sizes of a group (hundreds of tokens). One node for the whole
row also spares the backward of slicing and concatenation, which writes a full-size gradient per slice.

The query heads of one key head are viewed as further rows, so keys and values are never repeated.

Shapes: T tokens of the row, n rows of a piece, K its keys, M = n · Hq / Hkv rows of one key head, Hq query heads, Hkv
key heads, D head size of queries and keys, E of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from plait.data.packed import PackedBatch, Span
from plait.models.pieces import Piece
from plait.models.shape import KEPT_SCORES


@dataclass(frozen=True)
class PackedPlan:
    """What every layer of one window does with the batch."""

    pieces: tuple[Piece, ...]
    masks: tuple[Tensor, ...]
    """Per piece bool [n, C], True where a key is hidden, over the last C keys (C = n, or all with a window)."""
    keep_probs: bool


def plan(pieces: Sequence[Piece], batch: PackedBatch, num_heads: int, window: int | None) -> PackedPlan:
    """Masks of the pieces, and whether the probabilities of a layer are few enough to be kept."""
    positions_T = batch.position_ids_T
    lengths, labels = [], []
    for group in batch.groups:
        for label, span in enumerate((group.prompt, *group.responses)):
            lengths.append(span.length)
            labels.append(label)
    segments = torch.arange(len(lengths))
    prompt = torch.tensor([label == 0 for label in labels])
    segment_T = segments.repeat_interleave(torch.tensor(lengths)).to(positions_T.device)
    prompt_T = prompt.repeat_interleave(torch.tensor(lengths)).to(positions_T.device)
    masks = []
    for piece in pieces:
        rows = slice(piece.rows.start, piece.rows.stop)
        masked = [piece.rows] if window is None else [*piece.context, piece.rows]
        at = torch.cat([torch.arange(span.start, span.stop) for span in masked]).to(positions_T.device)
        behind = positions_T[rows, None] - positions_T[None, at]
        seen = (behind >= 0) & ((segment_T[rows, None] == segment_T[None, at]) | prompt_T[None, at])
        if window is not None:
            seen &= behind < window
        masks.append(~seen)
    num_scores = num_heads * sum(piece.num_scores for piece in pieces)
    return PackedPlan(tuple(pieces), tuple(masks), num_scores <= KEPT_SCORES)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: PackedPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [Hq, T, D], key [Hkv, T, D], value [Hkv, T, E], sinks [Hq] → [T, Hq, E]; once differentiable."""
    keep = plan.keep_probs and softcap is None and torch.is_grad_enabled()
    return _PackedAttention.apply(query, key, value, sinks, plan, keep, scale, softcap)  # type: ignore[no-any-return]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: PackedPlan,
        keep: bool,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        kept = []
        for piece, mask in zip(plan.pieces, plan.masks, strict=True):
            rows, keys = _rows(query, piece, key.shape[0]), _keys(key, piece)
            probs, sink_probs, _ = _probs(rows, keys, mask, _sink_column(sinks, piece, key.shape[0]), scale, softcap)
            _put_rows(out.transpose(0, 1), torch.bmm(probs, _keys(value, piece)), piece)
            if keep:
                kept += [probs, sink_probs]
        ctx.plan, ctx.scale, ctx.softcap = plan, scale, softcap
        ctx.save_for_backward(query, key, value, sinks, *kept)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, *kept = ctx.saved_tensors
        scale, softcap = ctx.scale, ctx.softcap
        grad_out = grad_out.transpose(0, 1)
        grad_query = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        grad_key = torch.zeros_like(key, dtype=wide)
        grad_value = torch.zeros_like(value, dtype=wide)
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
        for index, (piece, mask) in enumerate(zip(ctx.plan.pieces, ctx.plan.masks, strict=True)):
            rows, keys = _rows(query, piece, key.shape[0]), _keys(key, piece)
            column = _sink_column(sinks, piece, key.shape[0])
            tanh = None
            if kept:
                probs, sink_probs = kept[2 * index : 2 * index + 2]
            else:
                probs, sink_probs, tanh = _probs(rows, keys, mask, column, scale, softcap)
            grad_rows = _rows(grad_out, piece, key.shape[0])
            _add_keys(grad_value, torch.bmm(probs.transpose(1, 2), grad_rows), piece)
            grad_probs = torch.bmm(grad_rows, _keys(value, piece).transpose(1, 2))
            if grad_sinks is not None:
                weighted = sink_probs * (probs * grad_probs).sum(-1, dtype=wide)
                grad_sinks -= weighted.view(len(grad_sinks), -1).sum(-1)  # − p_sink · Σ_k p_k ∂p_k
            grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            if tanh is not None:
                grad_scores = (grad_scores * (1 - tanh * tanh)).to(probs.dtype)
            _put_rows(grad_query, _scaled_bmm(grad_scores, keys, scale), piece)
            _add_keys(grad_key, _scaled_bmm(grad_scores.transpose(1, 2), rows, scale), piece)
        if grad_sinks is not None:
            grad_sinks = grad_sinks.to(sinks.dtype)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_sinks, None, None, None, None


def _probs(
    rows: Tensor, keys: Tensor, mask: Tensor, sinks: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Probabilities [Hkv, M, K] in the dtype of `rows` (softmax in float32 or wider).

    Also those of the sinks [Hkv, M] and the tanh of a softcap, both in float32 or wider.
    """
    scores, tanh = _scaled_bmm(rows, keys.transpose(1, 2), scale), None
    wide = torch.promote_types(scores.dtype, torch.float32)
    if softcap is not None:
        tanh = torch.tanh(scores.to(wide) / softcap)
        scores = tanh * softcap
    by_head = scores.view(scores.shape[0], -1, mask.shape[0], scores.shape[2])
    by_head[..., scores.shape[2] - mask.shape[1] :].masked_fill_(mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1, dtype=wide).to(rows.dtype), None, tanh
    probs = torch.cat([scores.to(wide), sinks.to(wide)], dim=-1).softmax(-1)
    return probs[..., :-1].to(rows.dtype, memory_format=torch.contiguous_format), probs[..., -1].clone(), tanh


def _scaled_bmm(left: Tensor, right: Tensor, scale: float) -> Tensor:
    out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    return torch.baddbmm(out, left, right, beta=0, alpha=scale)


def _rows(tensor: Tensor, piece: Piece, num_key_heads: int) -> Tensor:
    """[Hq, T, D] → [Hkv, M, D]: the query heads of a key head one after another."""
    rows = tensor[:, piece.rows.start : piece.rows.stop]
    return rows.reshape(num_key_heads, -1, tensor.shape[2])


def _put_rows(into: Tensor, rows: Tensor, piece: Piece) -> None:
    """The inverse of `_rows`, written into [Hq, T, D]."""
    into[:, piece.rows.start : piece.rows.stop] = rows.view(into.shape[0], piece.rows.length, into.shape[2])


def _spans(piece: Piece) -> tuple[Span, ...]:
    return (*piece.context, piece.rows)


def _keys(tensor: Tensor, piece: Piece) -> Tensor:
    """[Hkv, T, D] → [Hkv, K, D] in the piece's order."""
    spans = _spans(piece)
    if all(left.stop == right.start for left, right in pairwise(spans)):
        return tensor[:, spans[0].start : spans[-1].stop]
    return torch.cat([tensor[:, span.start : span.stop] for span in spans], dim=1)


def _add_keys(into: Tensor, keys: Tensor, piece: Piece) -> None:
    """The transpose of `_keys`: adds [Hkv, K, D] into [Hkv, T, D]."""
    start = 0
    for span in _spans(piece):
        into[:, span.start : span.stop] += keys[:, start : start + span.length]
        start += span.length


def _sink_column(sinks: Tensor | None, piece: Piece, num_key_heads: int) -> Tensor | None:
    """[Hq] → [Hkv, M, 1]."""
    if sinks is None:
        return None
    column = sinks.view(num_key_heads, -1, 1).expand(-1, -1, piece.rows.length)
    return column.reshape(num_key_heads, -1, 1)

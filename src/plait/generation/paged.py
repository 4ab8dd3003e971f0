"""Attention of new tokens over contexts in blocks: which way is taken, the plain way, and that of long chunks.

`paged_attention_plain` says what is computed; the kernels (`kernels.paged_attention`, on a GPU
`kernels.device_attention`) equal it up to rounding. Without a kernel (float64, no numba) keys are gathered and torch's
own products compute.

Shapes: T new tokens, S samples, R rows of a sample (the most of any in the call), M columns of the block tables, N
blocks of P tokens, K = M · P places looked at, Hq query heads, Hkv key heads, G = Hq / Hkv query heads that share a key
head, D and E head sizes of keys and of values, n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.generation.pool import context_of
from plait.kernels import device_attention, on_devices, paged_attention
from plait.kernels.paged_call import PagedCall
from plait.models.compute import widened
from plait.models.compute.attention_form import AttentionForm

PRODUCTS_FROM = 4096
"""Keys of the batch, S · Hkv · K, from which two batched products in bfloat16 beat the fused kernel on a CPU. In µs, D
64, K 192, fused against products: S 1, Hkv 3, G 3: 30, 56; S 8: 178, 136; S 32: 1,110, 569; S 32, Hkv 9, G 1: 4,755,
1,438. In float32 the fused kernel is the faster one or nearly."""

CHUNK_SCORES = 1 << 22
"""Scores of a chunk that are computed at once."""

Ancestors = Sequence[Tensor | None] | None
PagedAttention = Callable[[PagedCall], Tensor]
"""[T, Hq, E] in the dtype of the query, up to rounding that of `paged_attention_plain`."""


def attention_for(device: torch.device, dtype: torch.dtype, block_tokens: int) -> PagedAttention:
    """The fastest way that there is for calls on this device, in this dtype, over blocks of so many tokens."""
    if device.type == "cuda" and on_devices.AVAILABLE and dtype != torch.float64:
        return device_attention.paged_attention
    compiled = paged_attention.AVAILABLE and dtype in (torch.float32, torch.bfloat16)
    if compiled and device.type == "cpu" and block_tokens == paged_attention.KEYS:
        return paged_attention.paged_attention
    return _split if dtype == torch.float64 else _gathered


def paged_attention_plain(call: PagedCall) -> Tensor:
    """What is computed: the softmax in float32, of float64 all in float64.

    Returns:
        [T, Hq, E] in the dtype of the query.
    """
    query, key_pool, value_pool, tables_SM, starts_S1, held_S = (
        call.query, call.key_pool, call.value_pool, call.tables_SM, call.starts_S1, call.held_S,
    )  # fmt: skip
    scale, window, softcap, sinks = call.scale, call.window, call.softcap, call.sinks
    wide = torch.promote_types(query.dtype, torch.float32)
    num_key_heads, block_tokens = key_pool.shape[1:3]
    starts = starts_S1.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    held = held_S.tolist()
    width = -(-max(have + new for have, new in zip(held, counts, strict=True)) // block_tokens)
    ids_SM = tables_SM[:, :width].clamp(min=0).long()
    rows_SR = _rows(starts_S1, max(counts))
    query_SRHD = query[rows_SR.clamp(max=len(query) - 1)].to(wide)
    query_SHGRD = query_SRHD.unflatten(2, (num_key_heads, -1)).permute(0, 2, 3, 1, 4)
    key = context_of(key_pool, ids_SM).to(wide)
    scores_SHGRK = query_SHGRD.flatten(2, 3) @ key.transpose(2, 3) * scale
    scores_SHGRK = scores_SHGRK.unflatten(2, query_SHGRD.shape[2:4])
    if softcap is not None:
        scores_SHGRK = softcap * torch.tanh(scores_SHGRK / softcap)
    seen_SRK = _seen(held_S, counts, max(counts), key.shape[2], call.ancestors, window)
    scores_SHGRK = scores_SHGRK.masked_fill(~seen_SRK[:, None, None], -torch.inf)
    if sinks is not None:
        column = sinks.to(wide).view(1, num_key_heads, -1, 1, 1).expand(*scores_SHGRK.shape[:4], 1)
        scores_SHGRK = torch.cat([scores_SHGRK, column], dim=-1)
    probs = scores_SHGRK.softmax(-1)[..., : key.shape[2]]
    value = context_of(value_pool, ids_SM).to(wide)
    out_SHGRE = (probs.flatten(2, 3) @ value).unflatten(2, probs.shape[2:4])
    out_SRHE = out_SHGRE.permute(0, 3, 1, 2, 4).flatten(2, 3)
    there_SR = rows_SR < starts_S1[1:, None]
    return out_SRHE[there_SR].to(query.dtype)


def _gathered(call: PagedCall) -> Tensor:
    """By torch's products over gathered keys."""
    if call.softcap is not None or call.sinks is not None or call.most()[0] > 1:
        return _split(call)
    return _one_row_each(call)


def _split(call: PagedCall) -> Tensor:
    """`paged_attention_plain` of samples with one new token, then of the others: it pads all samples of a call to as
    many rows as the longest has."""
    query, starts_S1 = call.query, call.starts_S1
    counts = [stop - start for start, stop in pairwise(starts_S1.tolist())]
    singles = [sample for sample, count in enumerate(counts) if count == 1]
    others = [sample for sample, count in enumerate(counts) if count > 1]
    if not (singles and others):
        return paged_attention_plain(call)
    out = query.new_empty(len(query), query.shape[1], call.value_pool.shape[3])
    for part in (singles, others):
        part_S = torch.tensor(part, device=query.device)
        rows_S = (starts_S1[1:] - starts_S1[:-1])[part_S]
        starts = F.pad(rows_S.cumsum(0), (1, 0)).int()
        first_S = starts_S1[part_S] - starts[:-1]
        rows_T = torch.arange(sum(counts[sample] for sample in part), device=query.device)
        rows_T = rows_T + first_S.repeat_interleave(rows_S)
        of_part = replace(
            call,
            query=query[rows_T],
            tables_SM=call.tables_SM[part_S],
            starts_S1=starts,
            held_S=call.held_S[part_S],
            ancestors=None if call.ancestors is None else [call.ancestors[sample] for sample in part],
        )
        out[rows_T] = paged_attention_plain(of_part)
    return out


def _rows(starts_S1: Tensor, most: int) -> Tensor:
    """[S, R] row numbers; those at or behind the next sample's start belong to no row."""
    return starts_S1[:-1, None].long() + torch.arange(most, device=starts_S1.device)


def _seen(
    held_S: Tensor, counts: Sequence[int], most: int, num_keys: int, ancestors: Ancestors, window: int | None
) -> Tensor:
    """bool [S, R, K]. Rows that no sample has see place 0, so that no softmax is over nothing."""
    held_S11 = held_S[:, None, None].long()
    places_K = torch.arange(num_keys, device=held_S.device)
    rows_R1 = torch.arange(most, device=held_S.device)[:, None]
    seen_SRK = places_K <= held_S11 + rows_R1
    positions_SR1 = held_S11 + rows_R1
    of_keys_S1K = places_K.expand(len(held_S), 1, -1).clone()
    for sample, tree in enumerate(ancestors or ()):
        if tree is None:
            continue
        held, count = int(held_S[sample]), counts[sample]
        seen_SRK[sample, :count, held : held + count] = tree
        depths = tree.sum(1) - 1 + held
        of_keys_S1K[sample, 0, held : held + count] = depths
        positions_SR1 = positions_SR1.clone()
        positions_SR1[sample, :count, 0] = depths
    if window is not None:
        seen_SRK &= positions_SR1 - of_keys_S1K < window
    for sample, count in enumerate(counts):
        if count < most:
            seen_SRK[sample, count:] = places_K == 0
    return seen_SRK


def _one_row_each(call: PagedCall) -> Tensor:
    """`paged_attention_plain` of one row per sample, in the dtype of the query."""
    query, key_pool, held_S, scale, window = call.query, call.key_pool, call.held_S, call.scale, call.window
    num_key_heads, block_tokens = key_pool.shape[1:3]
    ids_SM = call.tables_SM[:, : int(held_S.max()) // block_tokens + 1].clamp(min=0).long()
    key, value = context_of(key_pool, ids_SM), context_of(call.value_pool, ids_SM)
    positions_S1 = held_S[:, None].long()
    places_K = torch.arange(key.shape[2], device=key.device)
    hidden_SK = places_K > positions_S1
    if window is not None:
        hidden_SK |= positions_S1 - places_K >= window
    bias_SK = torch.zeros(hidden_SK.shape, dtype=torch.float32, device=key.device).masked_fill_(hidden_SK, -torch.inf)
    bias = bias_SK[:, None, None]
    query_SHGD = query.unflatten(1, (num_key_heads, -1))
    many_keys = key.shape[0] * key.shape[1] * key.shape[2] >= PRODUCTS_FROM
    by_products = query.dtype == torch.bfloat16 and query.device.type == "cpu" and not widened.takes(query)
    if not (many_keys and by_products):
        out = F.scaled_dot_product_attention(query_SHGD, key, value, attn_mask=bias.to(query.dtype), scale=scale)
        return out.flatten(1, 2)
    scores = (key.flatten(0, 1) @ query_SHGD.transpose(2, 3).flatten(0, 1)).transpose(1, 2)
    probs = torch.add(bias, scores.unflatten(0, query_SHGD.shape[:2]), alpha=scale).softmax(-1).to(query.dtype)
    return (probs.flatten(0, 1) @ value.flatten(0, 1)).view(len(query), -1, value.shape[3])


def chunk_attention(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    """The last n tokens of a context over all of it: query [Hq, n, D], key [Hkv, K, D], value [Hkv, K, E] → [n, Hq, E].

    Products in the dtype of the query, the softmax in float32 at least; many tokens are taken in pieces.
    """
    num_heads, num_rows, _ = query.shape
    num_key_heads, num_keys, value_size = value.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    out = query.new_empty(num_rows, num_heads, value_size)
    piece = max(1, CHUNK_SCORES // (num_heads * num_keys))
    places_K = torch.arange(num_keys, device=query.device)
    for start in range(0, num_rows, piece):
        rows = slice(start, min(start + piece, num_rows))
        query_HGnD = query[:, rows].unflatten(0, (num_key_heads, -1))
        scores = widened.batched_product(query_HGnD.flatten(1, 2), key.transpose(1, 2)).to(wide) * form.scale
        if form.softcap is not None:
            scores = form.softcap * torch.tanh(scores / form.softcap)
        behind_nK = places_K[rows.start - num_rows + num_keys :, None][: rows.stop - rows.start] - places_K
        hidden_nK = behind_nK < 0
        if form.window is not None:
            hidden_nK |= behind_nK >= form.window
        by_head = scores.unflatten(1, query_HGnD.shape[1:3]).masked_fill(hidden_nK, -torch.inf)
        if form.sinks is not None:
            column = form.sinks.to(wide).view(num_key_heads, -1, 1, 1).expand(*by_head.shape[:3], 1)
            by_head = torch.cat([by_head, column], dim=-1)
        probs = by_head.softmax(-1)[..., :num_keys].to(query.dtype).flatten(1, 2)
        attended = widened.batched_product(probs, value).unflatten(1, query_HGnD.shape[1:3])
        out[rows] = attended.flatten(0, 1).transpose(0, 1)
    return out

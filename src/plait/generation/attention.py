"""Attention of one decode step: each row's newest token over its own slot, all rows of the batch in one call a layer.

Shapes: B rows (one token each), K places looked at, L places of a slot, Hq query heads, Hkv key heads, G = Hq / Hkv
query heads that share a key head, D and E head sizes of keys and of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from plait.generation.cache import SlotCache

LENGTH_BUCKET = 32
"""The batch looks at a multiple of so many places: few distinct shapes, and little read beyond the longest row."""

PRODUCTS_FROM = 4096
"""Keys of the batch, B · Hkv · K, from which two batched products in bfloat16 beat the fused kernel on a CPU. In µs, D
64, K 192, fused against products: B 1, Hkv 3, G 3: 30, 56; B 8: 178, 136; B 32: 1,110, 569; B 32, Hkv 9, G 1: 4,755,
1,438. In float32 the fused kernel is the faster one or nearly."""


class DecodeContext:
    """An AttentionContext (models.attention) for one token per row: stores its key and value, then attends.

    Args:
        cache: slots 0 … B − 1 hold the rows' contexts and have room for one more token.
        positions: of the new tokens, which is also how many tokens each slot holds already.
    """

    def __init__(self, cache: SlotCache, positions: Sequence[int], positions_B: Tensor) -> None:
        longest = max(positions) + 1
        assert longest <= cache.length, f"a slot holds {cache.length} tokens, {longest} needed"
        self.cache = cache
        self.num_keys = min(cache.length, -(-longest // LENGTH_BUCKET) * LENGTH_BUCKET)
        self.positions_B = positions_B
        self._places: dict[int, Tensor] = {}
        self._biases: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See AttentionContext.attend; T is B here."""
        slots = self.cache.layers[layer]
        num_heads, num_rows, head_size = key.shape
        places = self._places_of(num_heads)
        slots.key.view(-1, head_size).index_copy_(0, places, key.reshape(-1, head_size))
        slots.value.view(-1, value.shape[2]).index_copy_(0, places, value.reshape(-1, value.shape[2]))
        out_BHGE = decode_attention(
            query.reshape(num_heads, -1, num_rows, head_size).permute(2, 0, 1, 3),
            slots.key[:num_rows, :, : self.num_keys],
            slots.value[:num_rows, :, : self.num_keys],
            bias=self._bias(window, torch.promote_types(query.dtype, torch.float32)),
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        return out_BHGE.reshape(num_rows, query.shape[0], value.shape[2])

    def _places_of(self, num_heads: int) -> Tensor:
        """[Hkv · B] rows of the cache seen as [S · Hkv · L, D] where the new tokens go, in the order of `key`."""
        if num_heads not in self._places:
            device = self.positions_B.device
            rows_B = torch.arange(len(self.positions_B), device=device)
            heads_H1 = torch.arange(num_heads, device=device)[:, None]
            places_HB = (rows_B * num_heads + heads_H1) * self.cache.length + self.positions_B
            self._places[num_heads] = places_HB.reshape(-1)
        return self._places[num_heads]

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, K]: 0 where a row sees the place, −inf where not. Made once per step and kind of layer."""
        if (window, dtype) not in self._biases:
            positions_B1 = self.positions_B[:, None]
            places_K = torch.arange(self.num_keys, device=positions_B1.device)
            hidden_BK = places_K > positions_B1
            if window is not None:
                hidden_BK |= positions_B1 - places_K >= window
            bias_BK = torch.zeros(hidden_BK.shape, dtype=dtype, device=hidden_BK.device)
            self._biases[window, dtype] = bias_BK.masked_fill_(hidden_BK, -torch.inf)[:, None, None, :]
        return self._biases[window, dtype]


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Query [B, Hkv, G, D] over key [B, Hkv, K, D], value [B, Hkv, K, E] → [B, Hkv, G, E].

    The query heads of a key head stand where SDPA expects query tokens, so that keys are read once for all of them.
    Families with a softcap or sinks take the plain way, in float32 at least.

    Args:
        bias: [B, 1, 1, K], added to the scores; float32, float64 for float64 queries.
        sinks: [Hq], see AttentionContext.attend.
    """
    if softcap is None and sinks is None:
        many_keys = key.shape[0] * key.shape[1] * key.shape[2] >= PRODUCTS_FROM
        if many_keys and query.dtype == torch.bfloat16 and query.device.type == "cpu":
            return _products(query, key, value, bias, scale)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    scores = (query @ key.transpose(2, 3)).to(torch.float64 if query.dtype == torch.float64 else torch.float32) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + bias
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, query.shape[1], query.shape[2], 1).expand(len(scores), -1, -1, -1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


def _products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """`decode_attention` by two batched products with a softmax in float32 between them, as `packed_attention` has it.

    Keys stand on the left of their product: of a slice of longer slots only the left operand is read where it lies, a
    transposed right one is copied first.
    """
    num_rows, num_heads, num_shared, head_size = query.shape
    query_NDG = query.transpose(2, 3).reshape(num_rows * num_heads, head_size, num_shared)
    scores_NKG = key.flatten(0, 1).bmm(query_NDG)
    scores = scores_NKG.transpose(1, 2).contiguous().view(num_rows, num_heads, num_shared, -1)
    probs = torch.add(bias, scores, alpha=scale).softmax(-1).to(query.dtype)
    return probs.flatten(0, 1).bmm(value.flatten(0, 1)).view(num_rows, num_heads, num_shared, -1)

"""In the place of torch's FlashAttention operators and of the kernels that lay keys out: the same by plain torch, with
the signatures of the operators, and refusing what they refuse. Every score is computed, in float32 or wider."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from plait.kernels.device_gather import GatherTable
from plait.models.compute.flash_plan import Operators


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """[T, Hq, D], twice [K, Hkv, D] → [T, Hq, D], log-sum-exps [Hq, T] and what nobody reads."""
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert dropout_p == 0.0
    assert is_causal
    assert not return_debug_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    out, sums = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0], dtype=wide)
    for rows, keys in _sequences(cum_seq_q, cum_seq_k):
        scores = _scores(query[rows], key[keys], scale)
        sums[:, rows] = scores.logsumexp(-1)
        probs = (scores - sums[:, rows, None]).exp()
        out[rows] = torch.einsum("hqk,khd->qhd", probs, _for_queries(value[keys], query)).to(out.dtype)
    return out, sums, torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64), query[:0]


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in their shapes; by Dao 2023, algorithm 2."""
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    assert dropout_p == 0.0
    assert is_causal
    assert torch.get_deterministic_debug_mode() == 2, "gradients of queries are added in any order"
    assert not torch.utils.deterministic.fill_uninitialized_memory
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
    heads = key.shape[1]
    for rows, keys in _sequences(cum_seq_q, cum_seq_k):
        probs = (_scores(query[rows], key[keys], scale) - logsumexp[:, rows, None]).exp()
        grad, wide_query = grad_out[rows].to(wide), query[rows].to(wide)
        grad_probs = torch.einsum("qhd,khd->hqk", grad, _for_queries(value[keys], query))
        weighted = (grad * out[rows].to(wide)).sum(-1).transpose(0, 1)
        grad_scores = probs * (grad_probs - weighted[..., None]) * scale
        grad_query[rows] = torch.einsum("hqk,khd->qhd", grad_scores, _for_queries(key[keys], query)).to(query.dtype)
        expanded = torch.einsum("hqk,qhd->khd", grad_scores, wide_query), torch.einsum("hqk,qhd->khd", probs, grad)
        for into, of_heads in zip((grad_key, grad_value), expanded, strict=True):
            into[keys] = of_heads.unflatten(1, (heads, -1)).sum(2).to(into.dtype)
    return grad_query, grad_key, grad_value


def gathered(key_THD: Tensor, value_THD: Tensor, table: GatherTable) -> tuple[Tensor, Tensor]:
    return key_THD.index_select(0, table.token_K), value_THD.index_select(0, table.token_K)


def folded(grad_keys_KHD: Tensor, grad_values_KHD: Tensor, table: GatherTable) -> tuple[Tensor, Tensor]:
    def sums(grads: Tensor) -> Tensor:
        zeros = torch.zeros(len(table.starts_T1) - 1, *grads.shape[1:], dtype=grads.dtype, device=grads.device)
        return zeros.index_add(0, table.token_K, grads)

    return sums(grad_keys_KHD), sums(grad_values_KHD)


STAND_IN = Operators(forward, backward, gathered, folded)


def _check(query: Tensor, key: Tensor, value: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int) -> None:
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value)), "numbers of a head lie one behind another"
    assert key.shape == value.shape
    assert query.shape[2] == key.shape[2]
    assert query.shape[2] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    for starts, tokens, most in ((cum_q, len(query), max_q), (cum_k, len(key), max_k)):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        lengths = starts.diff()
        assert (starts[0], starts[-1]) == (0, tokens)
        assert 0 < lengths.min() <= lengths.max() <= most, "no sequence is empty, or longer than was said"
    assert max_q > 1, "for single queries of grouped heads the operator has a way of its own"


def _sequences(cum_seq_q: Tensor, cum_seq_k: Tensor) -> list[tuple[slice, slice]]:
    rows, keys = ([slice(*pair) for pair in pairwise(starts.tolist())] for starts in (cum_seq_q, cum_seq_k))
    return list(zip(rows, keys, strict=True))


def _for_queries(tensor: Tensor, query: Tensor) -> Tensor:
    """[K, Hkv, D] → [K, Hq, D], wide."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _scores(query: Tensor, key: Tensor, scale: float) -> Any:
    """[Hq, q, k]; the last query sees all keys, the one before it all but one, and so on."""
    wide = query.to(torch.promote_types(query.dtype, torch.float32))
    scores = torch.einsum("qhd,khd->hqk", wide, _for_queries(key, query)) * scale
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(key) - len(query))
    return scores.masked_fill(~seen, float("-inf"))

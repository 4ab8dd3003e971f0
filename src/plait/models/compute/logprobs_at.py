"""Log-probs of several tokens at each place, and of all others together, in chunks over the head (`head_chunks`).

The K tokens and the rest are K + 1 outcomes whose probabilities add up to 1, so that two models can be compared by them
as by two distributions. The rest is summed by itself: 1 less what the K tokens have would be rounding where they have
nearly all.

    log π(y) = z_y − lse(z)          ∂ log π(y) / ∂z_v = [v = y] − p_v              z = logits / temperature
    log r = lse_{v ∉ ids} − lse(z)   ∂ log r / ∂z_v = [v ∉ ids] p_v / r − p_v

Shapes: R rows (response tokens), C rows of one chunk, H hidden size, V vocabulary, K tokens of each row, J = K + 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.models.compute.head_chunks import Buffers, Way, gradients, wide
from plait.models.head import Head, Vocabulary


def chunked_logprobs_at(
    head: Head, hidden_RH: Tensor, ids_RK: Tensor, temperature: float, rows: int | None = None
) -> Tensor:
    """Log-probs of these tokens under softmax(head(hidden) / temperature), and last that of all others together.

    Args:
        head: may be cut by vocabulary; then all its ranks call this with the same hidden states and get the same.
        hidden_RH: compute dtype; may require grad.
        ids_RK: int64 token ids.
        rows: of one chunk, see `chunked_logprobs`.

    Returns:
        [R, J] in float32, float64 for a float64 model; once differentiable with respect to the hidden states and the
        head's parameters. A rest of nothing is that of `_least`.
    """
    way = Way.of(head, hidden_RH, temperature, rows, is_fused=False)
    return _ChunkedLogprobsAt.apply(way, ids_RK, hidden_RH, *head.params)


@torch.no_grad()
def chunked_top_logprobs(
    head: Head, hidden_RH: Tensor, count: int, temperature: float, rows: int | None = None, *, among: int | None = None
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, and their log-probs as of `chunked_logprobs_at`; no gradient.

    Args:
        count: K, at most the vocabulary.
        among: only the first so many token ids are chosen from; None: all. What others have is in the rest.

    Returns:
        ids [R, K] int64, the likeliest first and of equally likely ones the lowest id, and log-probs [R, J].
    """
    way = Way.of(head, hidden_RH, temperature, rows, is_fused=False)
    ids_RK = hidden_RH.new_empty((len(hidden_RH), count), dtype=torch.int64)
    logprobs_RJ = hidden_RH.new_empty((len(hidden_RH), count + 1), dtype=wide(hidden_RH))
    buffers = Buffers(head)
    for at in way.chunks(len(hidden_RH)):
        scaled_CV = buffers.scaled(buffers.logits(hidden_RH[at]), temperature)
        ids_RK[at] = _likeliest(buffers, scaled_CV, count, among)
        logprobs_RJ[at], _ = _logprobs_at(buffers, scaled_CV, ids_RK[at])
    return ids_RK, logprobs_RJ


class _ChunkedLogprobsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, ids_RK: Tensor, hidden_RH: Tensor, *params: Tensor) -> Tensor:
        logprobs_RJ = hidden_RH.new_empty((len(ids_RK), ids_RK.shape[1] + 1), dtype=wide(hidden_RH))
        lse_R = logprobs_RJ.new_empty(len(ids_RK))
        buffers = Buffers(way.head)
        for at in way.chunks(len(hidden_RH)):
            scaled_CV = buffers.scaled(buffers.logits(hidden_RH[at]), way.temperature)
            logprobs_RJ[at], lse_R[at] = _logprobs_at(buffers, scaled_CV, ids_RK[at])
        ctx.way = way
        ctx.save_for_backward(ids_RK, hidden_RH, lse_R, logprobs_RJ[:, -1].clone())
        return logprobs_RJ

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_RJ: Tensor) -> tuple[Any, ...]:
        ids_RK, hidden_RH, lse_R, rest_R = ctx.saved_tensors
        way: Way = ctx.way

        def grad_of(at: slice) -> _LogitsGrad:
            return _LogitsGrad(way.head, ids_RK[at], lse_R[at], rest_R[at], grad_RJ[at], way.temperature)

        return None, None, *gradients(way, Buffers(way.head), hidden_RH, ctx.needs_input_grad[2:], grad_of)


@dataclass(frozen=True)
class _LogitsGrad:
    """See `head_chunks.LogitsGrad`."""

    head: Head
    ids_CK: Tensor
    lse_C: Tensor
    rest_C: Tensor
    """Log-prob of the rest."""
    grad_CJ: Tensor
    temperature: float

    def __call__(self, scaled_CV: Tensor, out_CV: Tensor) -> Tensor:
        """[C, V] → `out_CV`; the argument is overwritten."""
        probs_CV = torch.exp(scaled_CV.sub_(self.lse_C[:, None]), out=out_CV)
        places_CK, has_CK = _places(self.head, self.ids_CK)
        others_CV = _without(scaled_CV.copy_(probs_CV), places_CK, has_CK)
        at_ids_CK, at_rest_C = self.grad_CJ[:, :-1], self.grad_CJ[:, -1] * (-self.rest_C).exp()
        grad_CV = probs_CV.mul_(-self.grad_CJ.sum(-1, keepdim=True)).addcmul_(others_CV, at_rest_C[:, None])
        grad_CV.scatter_add_(1, places_CK, at_ids_CK if has_CK is None else at_ids_CK * has_CK)
        return grad_CV.div_(self.temperature)

    def compiled(self, logits_CV: Tensor, hidden_CH: Tensor) -> None:
        """No kernel computes this [C, V]."""


def _logprobs_at(buffers: Buffers, scaled_CV: Tensor, ids_CK: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs [C, J] of the tokens and the rest, and the log-sum-exp [C]. The logits are overwritten."""
    vocabulary = buffers.head.vocabulary
    top_C = scaled_CV.amax(-1)
    if vocabulary is not None:
        top_C = vocabulary.most(top_C)
    shifted_CV = scaled_CV.sub_(top_C[:, None])
    places_CK, has_CK = _places(buffers.head, ids_CK)
    at_CK = shifted_CV.gather(1, places_CK)
    weights_CV = torch.exp(shifted_CV, out=buffers.room("weights", shifted_CV, shifted_CV.dtype))
    total_C = weights_CV.sum(-1)
    rest_C = _without(weights_CV, places_CK, has_CK).sum(-1)
    if vocabulary is not None and has_CK is not None:
        parts = torch.cat([at_CK.masked_fill_(~has_CK, 0.0), total_C[:, None], rest_C[:, None]], dim=1)
        at_CK, total_C, rest_C = vocabulary.sums(parts)[0].tensor_split((-2, -1), dim=1)
        total_C, rest_C = total_C[:, 0], rest_C[:, 0]
    log_total_C = total_C.log()
    log_rest_C = (rest_C.log() - log_total_C).clamp(min=_least(rest_C.dtype))
    return torch.cat([at_CK - log_total_C[:, None], log_rest_C[:, None]], dim=1), log_total_C + top_C


def _least(dtype: torch.dtype) -> float:
    """The log of a probability that is nothing (1e-19 in float32), and whose inverse may be multiplied."""
    return math.log(torch.finfo(dtype).tiny) / 2


def _places(head: Head, ids_CK: Tensor) -> tuple[Tensor, Tensor | None]:
    """Columns [C, K] of the tokens among this rank's logits, and whether it has them [C, K]; None: it has all."""
    return (ids_CK, None) if head.vocabulary is None else head.vocabulary.places(ids_CK)


def _without(weights_CV: Tensor, places_CK: Tensor, has_CK: Tensor | None) -> Tensor:
    """Weights [C, V], which are not negative, with 0 at these places; in place."""
    kept_CK = torch.zeros_like(places_CK, dtype=weights_CV.dtype)
    if has_CK is not None:  # the places of tokens that others have are any
        kept_CK.masked_fill_(~has_CK, math.inf)
    return weights_CV.scatter_reduce_(1, places_CK, kept_CK, "amin")


def _likeliest(buffers: Buffers, scaled_CV: Tensor, count: int, among: int | None) -> Tensor:
    """Ids [C, K] of the likeliest tokens; the same on all ranks that share a head."""
    vocabulary, width = buffers.head.vocabulary, scaled_CV.shape[1]
    if vocabulary is None:
        return _first(buffers, scaled_CV, width if among is None else min(among, width), count)[0]
    allowed = [_allowed(vocabulary, index, among) for index in range(vocabulary.peers.size)]
    own = allowed[vocabulary.peers.index]
    ids_CL, values_CL = _first(buffers, scaled_CV, own, min(count, own))
    found = [(ids_CL + vocabulary.start).t(), values_CL.t()]
    counts = [min(count, of_rank) for of_rank in allowed]
    # Ranks follow each other as their ids do, so that of equally likely tokens the lowest id stays the first.
    ids_CM, values_CM = (torch.cat(vocabulary.peers.all_gather(part, counts)).t() for part in found)
    return ids_CM.gather(1, values_CM.sort(dim=-1, descending=True, stable=True).indices[:, :count])


def _allowed(vocabulary: Vocabulary, index: int, among: int | None) -> int:
    """How many of the first tokens of a rank may be chosen."""
    start, stop = vocabulary.bounds[index : index + 2]
    return stop - start if among is None else min(max(0, among - start), stop - start)


def _first(buffers: Buffers, scaled_CV: Tensor, allowed: int, count: int) -> tuple[Tensor, Tensor]:
    """Places [C, K] of the largest of the first `allowed` logits, and these, the largest first, of equal ones those at
    the lowest place."""
    if not count:
        return scaled_CV.new_empty((len(scaled_CV), 0), dtype=torch.int64), scaled_CV[:, :0]
    allowed_CA = scaled_CV[:, :allowed]
    values_CK, places_CK = allowed_CA.topk(count)
    least_C1 = values_CK[:, -1:]
    # Which of those that equal the last one `topk` gives is the device's choice.
    equal_CA = torch.eq(allowed_CA, least_C1, out=buffers.room("weights", scaled_CV, scaled_CV.dtype)[:, :allowed])
    order_A = torch.arange(allowed, 0, -1, dtype=scaled_CV.dtype, device=scaled_CV.device)
    lowest_CK = equal_CA.mul_(order_A).topk(count).indices
    ranks_CK = torch.arange(count, device=scaled_CV.device) - (values_CK > least_C1).sum(-1, keepdim=True)
    places_CK = places_CK.where(ranks_CK < 0, lowest_CK.gather(1, ranks_CK.clamp(min=0))).sort(-1).values
    values_CK, order_CK = allowed_CA.gather(1, places_CK).sort(dim=-1, descending=True, stable=True)
    return places_CK.gather(1, order_CK), values_CK

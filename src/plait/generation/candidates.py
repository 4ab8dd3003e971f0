"""The draw among the most probable tokens and one entry for the rest, by torch's operators: see `generation.sampler`.

Shapes: B rows, V tokens of the vocabulary, W the most probable ones that are looked at, C of them found in blocks, S
blocks of D tokens, R rows whose token is of the rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.kernels import noise


def largest(logits_BV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits of each row, descending, and their ids; which of equal ones is open, as with `topk`.

    A block of tokens that holds one of them is among the `count` blocks with the largest maxima (or ties with one that
    is), so only these are searched: 0.4 ms in place of 1.0 for 32 rows of 4,096. Block n has the tokens n, n + S, n +
    2 S, … of S blocks, which makes their maxima one pass over adjacent numbers.
    """
    num_rows, vocab_size = logits_BV.shape
    num_blocks = math.isqrt(vocab_size * count)  # as many maxima to search as tokens in the blocks
    depth = vocab_size // num_blocks
    if depth < 2:
        return logits_BV.topk(count, dim=-1)
    blocked = depth * num_blocks
    blocks_BDS = logits_BV[:, :blocked].view(num_rows, depth, num_blocks)
    ids_BC = blocks_BDS.amax(1).topk(count, dim=-1, sorted=False).indices
    found_BX = blocks_BDS.gather(2, ids_BC[:, None].expand(-1, depth, -1)).reshape(num_rows, depth * count)
    rest_BX = logits_BV[:, blocked:]
    logits_BW, places_BW = torch.cat([found_BX, rest_BX], dim=1).topk(count, dim=-1)
    in_blocks_BW = ids_BC.gather(1, places_BW % count) + places_BW // count * num_blocks
    in_rest_BW = places_BW + (blocked - depth * count)
    return logits_BW, torch.where(places_BW < depth * count, in_blocks_BW, in_rest_BW)


def among_candidates(
    top_logits_BW: Tensor, top_ids_BW: Tensor, kept_BW: Tensor, weights_BV: Tensor, draw_keys_B: Tensor
) -> Tensor:
    """Argmax [B] of log weight + Gumbel over the kept candidates and the tail.

    Args:
        top_logits_BW, top_ids_BW: of the candidates, less the largest logit, and their ids.
        kept_BW: which of them may be drawn.
        weights_BV: softmax numerators of all tokens, 0 for those that are left out; overwritten by those of the tail.
        draw_keys_B: int64 keys of the draws.
    """
    ids_BX = torch.cat([top_ids_BW, _tail_ids(top_ids_BW)], dim=1)
    uniform_BX = noise.uniform(draw_keys_B[:, None], ids_BX)  # of the candidates, the tail, the pick within the tail
    gumbel_BY = uniform_BX[:, :-1].log().neg_().log_().neg_()
    scores_BW = (top_logits_BW + gumbel_BY[:, :-1]).masked_fill_(~kept_BW, -torch.inf)
    # Zeroing the candidates' weights and summing the rest keeps the digits that 1 - mass(candidates) would lose.
    tail_BV = weights_BV.scatter_(1, top_ids_BW, weights_BV.gather(1, top_ids_BW).masked_fill_(kept_BW, 0.0))
    tail_score_B1 = tail_BV.sum(-1, dtype=torch.float64, keepdim=True).log_().add_(gumbel_BY[:, -1:])
    winner_B = torch.cat([scores_BW, tail_score_B1], dim=1).argmax(-1)
    in_tail_B = winner_B == top_ids_BW.shape[1]
    token_ids_B = top_ids_BW.gather(1, winner_B.clamp(max=top_ids_BW.shape[1] - 1)[:, None])[:, 0]
    if tail_BV.device.type != "cpu":  # the host does not ask which rows
        return torch.where(in_tail_B, tail_pick(tail_BV, uniform_BX[:, -1]), token_ids_B)
    rows_R = in_tail_B.nonzero()[:, 0]
    if rows_R.numel():
        token_ids_B[rows_R] = tail_pick(tail_BV[rows_R], uniform_BX[rows_R, -1])
    return token_ids_B


def tail_pick(tail_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """[R] tokens by the inverse of the distribution function of their weights."""
    cumulative_RV = tail_RV.cumsum(-1, dtype=torch.float64)
    total_R = cumulative_RV[:, -1]
    # A product that rounds up to the total would fall behind the last token that has weight.
    point_R = torch.minimum(uniform_R * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    return torch.searchsorted(cumulative_RV, point_R[:, None], right=True)[:, 0].clamp_(
        max=tail_RV.shape[1] - 1  # of use for NaN only
    )


def _tail_ids(like_BW: Tensor) -> Tensor:
    """[B, 2]"""
    # Counted down on the device: a list would be uploaded in every step.
    ids = torch.arange(noise.TAIL_GUMBEL, noise.TAIL_UNIFORM - 1, -1, device=like_BW.device, dtype=like_BW.dtype)
    return ids.expand(len(like_BW), -1)

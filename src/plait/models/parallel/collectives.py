"""Collectives that autograd knows: what tensor parallelism puts before and after a layer that is sharded.

Megatron-LM's f and g (Shoeybi et al. 2019, arXiv 1909.08053, section 3), and two for layers whose neighbours are not
cut. All ranks of the peers call them in the same order, forward and backward, with tensors of equal shape (but for the
cut dim).

                      forward                         backward
    copied (f)        identity                        sum over the ranks
    reduced (g)       sum over the ranks              identity
    gathered          all columns from their ranks    the gradient of the own columns
    split             the own columns                 all columns from their ranks

And four of sequence parallelism, whose tensors are [1, tokens, H]; rank i has the tokens bounds[i] to bounds[i + 1]
(Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2: `entered` and `left` are its g and its conjugate):

    entered           all tokens from their ranks     sum over the ranks, the own tokens
    left              sum over the ranks, own tokens  all tokens from their ranks
    shared_out        the own tokens                  all tokens from their ranks
    rejoined          all tokens from their ranks     the gradient of the own tokens
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from plait.models.parallel.peers import Peers
from plait.models.parallel.reduce_scatter import reduce_scatter

Ranges = tuple[tuple[int, int], ...]
"""Columns [start, stop) of the last dim, of each rank by index."""

Bounds = tuple[int, ...]
"""The first token of each rank by index, and their number."""

Way = Callable[[Tensor, Peers, Bounds], Tensor]


def copied(x: Tensor, peers: Peers, *, counts: bool = True) -> Tensor:
    """x, of any shape and equal on all ranks, for a computation of which each rank does a part.

    Args:
        counts: False where another rank does this very part too, whose gradient is taken.
    """
    return _Copied.apply(x, peers, counts)  # type: ignore[no-any-return]


def reduced(x: Tensor, peers: Peers) -> Tensor:
    """The sum of the ranks' parts, of one shape; equal on all of them."""
    return _Reduced.apply(x, peers)  # type: ignore[no-any-return]


def gathered(x: Tensor, peers: Peers, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The whole of a tensor of which rank i has the columns ranges[i]. Ranges may be equal: such ranks have the same.

    All ranks must use the result alike.
    """
    return _Gathered.apply(x, peers, tuple(ranges))  # type: ignore[no-any-return]


def split(x: Tensor, peers: Peers, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The columns ranges[i] of x, which is equal on all ranks; ranges are disjoint and cover x."""
    return _Split.apply(x, peers, tuple(ranges))  # type: ignore[no-any-return]


def entered(own: Tensor, peers: Peers, bounds: Sequence[int]) -> Tensor:
    """All tokens [1, T, H] of the own ones [1, t, H], for a computation of which each rank does a part."""
    return _Tokens.apply(own, all_tokens, _own_sum, peers, tuple(bounds))  # type: ignore[no-any-return]


def left(part: Tensor, peers: Peers, bounds: Sequence[int]) -> Tensor:
    """The own tokens [1, t, H] of the sum of the ranks' parts [1, T, H]."""
    return _Tokens.apply(part, _own_sum, all_tokens, peers, tuple(bounds))  # type: ignore[no-any-return]


def shared_out(whole: Tensor, peers: Peers, bounds: Sequence[int]) -> Tensor:
    """The own tokens [1, t, H] of what is equal on all ranks [1, T, H]."""
    return _Tokens.apply(whole, _own_tokens, all_tokens, peers, tuple(bounds))  # type: ignore[no-any-return]


def rejoined(own: Tensor, peers: Peers, bounds: Sequence[int]) -> Tensor:
    """All tokens [1, T, H] of the own ones [1, t, H], for what all ranks compute alike."""
    return _Tokens.apply(own, all_tokens, _own_tokens, peers, tuple(bounds))  # type: ignore[no-any-return]


def all_tokens(own: Tensor, peers: Peers, bounds: Bounds) -> Tensor:
    """All tokens [1, T, H] of the own ones [1, t, H]; autograd knows nothing of it."""
    lengths = [stop - start for start, stop in pairwise(bounds)]
    return torch.cat(peers.all_gather(own[0], lengths))[None]


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, counts: bool) -> Tensor:
        ctx.peers, ctx.counts = peers, counts
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        own = grad.clone(memory_format=torch.contiguous_format) if ctx.counts else _zeros_like(grad)
        return ctx.peers.all_reduce(own), None, None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return torch.ops.plait.reduced(x, peers.number)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, ranges: Ranges) -> Tensor:
        ctx.own = ranges[peers.index]
        return _gather(x, peers, ranges)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., slice(*ctx.own)].contiguous(), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, ranges: Ranges) -> Tensor:
        ctx.peers, ctx.ranges = peers, ranges
        return x[..., slice(*ranges[peers.index])].contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.peers, ctx.ranges), None, None


class _Tokens(torch.autograd.Function):
    """A way of tokens between ranks, and that of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Way, back: Way, peers: Peers, bounds: Bounds) -> Tensor:
        ctx.back, ctx.peers, ctx.bounds = back, peers, bounds
        return there(x, peers, bounds)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad, ctx.peers, ctx.bounds), None, None, None, None


def _own_tokens(whole: Tensor, peers: Peers, bounds: Bounds) -> Tensor:
    return whole[:, bounds[peers.index] : bounds[peers.index + 1]].contiguous()


def _own_sum(part: Tensor, peers: Peers, bounds: Bounds) -> Tensor:
    width = part.shape[-1]
    flat = part.clone(memory_format=torch.contiguous_format).view(-1)
    own = reduce_scatter(peers, flat, [bound * width for bound in bounds])
    return own.clone().view(1, -1, width)  # the rest of the sum's memory is not kept


def _gather(x: Tensor, peers: Peers, ranges: Ranges) -> Tensor:
    widest = max(stop - start for start, stop in ranges)
    padded = x.new_zeros((*x.shape[:-1], widest))
    padded[..., : x.shape[-1]] = x
    whole = x.new_empty((*x.shape[:-1], max(stop for _, stop in ranges)))
    for (start, stop), piece in zip(ranges, peers.all_gather(padded), strict=True):
        whole[..., start:stop] = piece[..., : stop - start]
    return whole


_operators = torch.library.Library("plait", "FRAGMENT")
_operators.define("reduced(Tensor part, int peers) -> Tensor")
"""As an operator a sum over ranks can stand in layers that torch compiles (`generation.fused_layers`)."""


def _sum(part: Tensor, peers: int) -> Tensor:
    return Peers.numbered(peers).all_reduce(part.clone(memory_format=torch.contiguous_format))


def _like_sum(part: Tensor, peers: int) -> Tensor:
    return torch.empty_like(part, memory_format=torch.contiguous_format)


_operators.impl("reduced", _sum, "CompositeExplicitAutograd")
torch.library.register_fake("plait::reduced", _like_sum, lib=_operators)


def _zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)

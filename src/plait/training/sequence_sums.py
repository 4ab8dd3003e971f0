"""Sums over the tokens of each response, differentiable and in the order of the tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class SequenceSum(torch.autograd.Function):
    """For each token the sum over its response: values [R] of any float dtype and lengths [N] int64, as of `sums_of`,
    to [R] in the dtype of the values. Its matrix is symmetric, so the backward is the same sum of gradients.

    Token after token, in float64: the sum of a response does not depend on what else is in the micro-batch, nor (unlike
    that of a scatter) on the order in which threads get there.
    """

    @staticmethod
    def forward(ctx: Any, values_R: Tensor, lengths_N: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_N)
        return _spread_sums(values_R, lengths_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """[R] to [R]."""
        (lengths_N,) = ctx.saved_tensors
        return _spread_sums(grads[0], lengths_N), None


class PerSequence(torch.autograd.Function):
    """For each sample the same sum, once: to [N] in the dtype of the values."""

    @staticmethod
    def forward(ctx: Any, values_R: Tensor, lengths_N: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_N)
        ctx.num_tokens = len(values_R)
        return sums_of(values_R, lengths_N).to(values_R.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """[N] to [R]."""
        (lengths_N,) = ctx.saved_tensors
        return grads[0].repeat_interleave(lengths_N, output_size=ctx.num_tokens), None


def _spread_sums(values_R: Tensor, lengths_N: Tensor) -> Tensor:
    return sums_of(values_R, lengths_N).repeat_interleave(lengths_N, output_size=len(values_R)).to(values_R.dtype)


def sums_of(values_R: Tensor, lengths_N: Tensor) -> Tensor:
    """The sum over the tokens of each response.

    Args:
        values_R: [R], float.
        lengths_N: [N] int64, response tokens of each; they add up to R.

    Returns:
        [N] float64.
    """
    return torch.segment_reduce(values_R.double(), "sum", lengths=lengths_N, unsafe=True, initial=0.0)

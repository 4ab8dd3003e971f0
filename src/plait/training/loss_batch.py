"""What a loss sees: one micro-batch, with the denominators of its whole mini-batch.

Shapes: R response tokens of the micro-batch, in row order. A loss returns this micro-batch's share of the mini-batch
loss; shares add up, so neither loss nor gradient depends on the split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.algorithms.losses import Aggregation
from plait.data.rows import Rows
from plait.errors import RunError


@dataclass(frozen=True)
class MiniBatchTotals:
    """Denominators of one optimizer step."""

    tokens: int
    """Response tokens."""
    sequences: int
    """Samples with at least one response token; an empty response has no token mean to average."""
    max_response_tokens: int
    """The recipe's response limit, the constant of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)."""

    @classmethod
    def of(cls, rows: Rows, max_response_tokens: int) -> MiniBatchTotals:
        return cls(rows.num_tokens, sum(len(sample.token_ids) > 0 for sample in rows.samples), max_response_tokens)


class TokenMeans:
    """Means over the tokens of a mini-batch, gathered micro-batch by micro-batch on the device, in float64."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, values_R: Tensor) -> None:
        share = values_R.detach().sum(dtype=torch.float64)
        self._sums[name] = self._sums[name] + share if name in self._sums else share

    def result(self) -> dict[str, float]:
        return {name: float(total) / max(1, self._num_tokens) for name, total in self._sums.items()}


class MicroBatchLoss:
    """The `LossBatch` that `Trainer.train` hands to a loss.

    Args:
        lengths: response tokens of each sample of the micro-batch, in the order of the rows; they add up to R.
    """

    def __init__(
        self,
        logprobs_R: Tensor,
        entropies_R: Tensor,
        sampling_logprobs_R: Tensor,
        lengths: Sequence[int],
        totals: MiniBatchTotals,
        means: TokenMeans,
    ) -> None:
        self.logprobs = logprobs_R
        self.entropies = entropies_R
        self.sampling_logprobs = sampling_logprobs_R
        self._lengths_N = torch.as_tensor(lengths, dtype=torch.int64, device=logprobs_R.device)
        self._lengths_R = self._lengths_N.repeat_interleave(self._lengths_N, output_size=len(logprobs_R))
        """For each token the length of its response."""
        self._totals = totals
        self._means = means

    def aggregate(self, values_R: Tensor, how: Aggregation | str) -> Tensor:
        """This micro-batch's share of the aggregate over the mini-batch (see `Aggregation`). A scalar.

        Raises:
            RunError: `values_R` is not [R], or `how` names no aggregation.
        """
        self._check(values_R, "aggregate")
        if how not in list(Aggregation):
            raise RunError(f"batch.aggregate: expected one of {', '.join(Aggregation)}, found `{how}`")
        totals = self._totals
        match Aggregation(how):
            case Aggregation.TOKEN_MEAN:
                return values_R.sum() / max(1, totals.tokens)
            case Aggregation.SEQUENCE_MEAN:
                return (values_R / self._lengths_R).sum() / max(1, totals.sequences)
            case Aggregation.CONSTANT:
                return values_R.sum() / (max(1, totals.sequences) * totals.max_response_tokens)

    def sequence_sum(self, values_R: Tensor) -> Tensor:
        """[R]: for each token the sum of `values_R` over its response. Differentiable; exact, as no response is split.

        Raises:
            RunError: `values_R` is not [R].
        """
        self._check(values_R, "sequence_sum")
        return _SequenceSum.apply(values_R, self._lengths_N)

    def log(self, name: str, values_R: Tensor) -> None:
        """Record the mean of `values_R` over the tokens of the mini-batch as metric `name`.

        Raises:
            RunError: `values_R` is not [R].
        """
        self._check(values_R, f"log({name!r})")
        self._means.add(name, values_R)

    def _check(self, values_R: Tensor, call: str) -> None:
        if not isinstance(values_R, Tensor) or values_R.shape != self.logprobs.shape:
            found = tuple(values_R.shape) if isinstance(values_R, Tensor) else repr(values_R)
            raise RunError(
                f"batch.{call}: expected one value per response token, {tuple(self.logprobs.shape)}, found {found}"
            )


class _SequenceSum(torch.autograd.Function):
    """For each token the sum over its response. Its matrix is symmetric, so the backward is the same sum of gradients.

    Token after token, in float64: the sum of a response does not depend on what else is in the micro-batch, nor (unlike
    that of a scatter) on the order in which threads get there.
    """

    @staticmethod
    def forward(ctx: Any, values_R: Tensor, lengths_N: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_N)
        return _sequence_sum(values_R, lengths_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (lengths_N,) = ctx.saved_tensors
        return _sequence_sum(grads[0], lengths_N), None


def _sequence_sum(values_R: Tensor, lengths_N: Tensor) -> Tensor:
    sums_N = torch.segment_reduce(values_R.double(), "sum", lengths=lengths_N, unsafe=True, initial=0.0)
    return sums_N.repeat_interleave(lengths_N, output_size=len(values_R)).to(values_R.dtype)


def loss_share(loss: Callable[..., Tensor], batch: MicroBatchLoss, columns: Mapping[str, Tensor]) -> Tensor:
    """Call the loss and check what it returns.

    Raises:
        RunError: it is not a scalar tensor that depends on the batch's log-probs or entropies.
    """
    share = loss(batch, **columns)
    title = getattr(getattr(loss, "func", loss), "__name__", repr(loss))
    if not isinstance(share, Tensor) or share.shape != ():
        found = f"a tensor of shape {tuple(share.shape)}" if isinstance(share, Tensor) else repr(share)
        raise RunError(f"the loss `{title}` must return a scalar tensor (see batch.aggregate), found {found}")
    if not share.requires_grad:
        raise RunError(f"the loss `{title}` has no gradient: it depends on neither batch.logprobs nor batch.entropies")
    return share

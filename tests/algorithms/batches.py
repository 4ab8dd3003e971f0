"""Run a loss on made-up outputs of a model, over any split into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from plait.models.outputs import Outputs as ModelOutputs
from plait.training.loss_batch import MicroBatchLoss, Responses
from plait.training.token_means import MiniBatchTotals, TokenMeans

Array = np.ndarray[Any, np.dtype[np.float64]]


def leaf(values: Sequence[float]) -> torch.Tensor:
    """float64 numbers whose gradient is kept."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@dataclass(frozen=True)
class Outputs:
    """What a model said of a mini-batch: `logprobs` [R] of a language model and `at` [R, J], whatever the tokens that
    they are asked of, or `values` [R] and `scores` [N]."""

    lengths: Sequence[int]
    logprobs: Array | None = None
    at: Array | None = None
    values: Array | None = None
    scores: Array | None = None
    likeliest: Array | None = None
    """1.0 or 0.0, for language models; None: where the probability is above 1/2, where it can be nothing else."""
    mask: Array | None = None
    sampling_logprobs: Array | None = None
    """None: zeros."""
    samples: Sequence[tuple[int, int]] | None = None
    """(prompt, index); None: each of its own prompt."""
    max_response_tokens: int = 7

    @property
    def ids(self) -> Sequence[tuple[int, int]]:
        return [(i, 0) for i in range(len(self.lengths))] if self.samples is None else self.samples

    @property
    def totals(self) -> MiniBatchTotals:
        """Counted here a second time, sample by sample."""
        mask = np.ones(sum(self.lengths)) if self.mask is None else self.mask
        trained, start = [], 0
        for length in self.lengths:
            trained.append(int(sum(mask[start : start + length])))
            start += length
        groups: dict[int, list[int]] = {}
        for (uid, _), count in zip(self.ids, trained, strict=True):
            groups.setdefault(uid, []).append(count)
        pairs = sum(len(counts) == 2 and min(counts) > 0 for counts in groups.values())
        return MiniBatchTotals(sum(trained), sum(n > 0 for n in trained), self.max_response_tokens, pairs)


@dataclass
class Result:
    loss: float = 0.0
    gradients: dict[str, list[Any]] = field(
        default_factory=lambda: {"logprobs": [], "at": [], "values": [], "scores": []}
    )
    metrics: dict[str, float] = field(default_factory=dict)


def pair_ids(count: int) -> list[tuple[int, int]]:
    """Ids of the samples of so many pairs, in order."""
    return [(uid, index) for uid in range(count) for index in (0, 1)]


def run_loss(
    loss: Callable[..., torch.Tensor], outputs: Outputs, columns: Mapping[str, Array] | None = None, cut: int = 0
) -> Result:
    """Loss, its gradient by what the model said, and metrics. Samples from `cut` on are a second micro-batch.

    Args:
        columns: [R] or [R, width] each, or a number for the whole batch.
    """
    result = Result()
    means = TokenMeans(outputs.totals.tokens)
    for part in (slice(0, cut), slice(cut, len(outputs.lengths))):
        if part.start == part.stop:
            continue
        tokens = slice(sum(outputs.lengths[: part.start]), sum(outputs.lengths[: part.stop]))
        given = {
            "logprobs": _leaf(outputs.logprobs, tokens),
            "at": _leaf(outputs.at, tokens),
            "values": _leaf(outputs.values, tokens),
            "scores": _leaf(outputs.scores, part),
        }
        batch = MicroBatchLoss(
            ModelOutputs(
                logprobs_R=given["logprobs"],
                likeliest_R=_likeliest(outputs, tokens),
                values_R=given["values"],
                scores_N=given["scores"],
                logprobs_at=None if given["at"] is None else lambda _, at=given["at"]: at,
            ),
            Responses(
                outputs.lengths[part],
                torch.tensor(_sampling_logprobs(outputs)[tokens], dtype=torch.float64),
                None if outputs.mask is None else torch.tensor(outputs.mask[tokens], dtype=torch.float64),
                outputs.ids[part],
            ),
            outputs.totals,
            means,
        )
        share = loss(
            batch,
            **{
                name: torch.tensor(column[tokens] if np.ndim(column) else column, dtype=torch.float64)
                for name, column in (columns or {}).items()
            },
        )
        share.backward()
        result.loss += float(share.detach())
        for name, leaf in given.items():
            if leaf is not None:
                result.gradients[name] += (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).tolist()
    result.metrics = means.result()
    return result


def _leaf(values: Array | None, part: slice) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values[part], dtype=torch.float64, requires_grad=True)


def _sampling_logprobs(outputs: Outputs) -> Array:
    return np.zeros(sum(outputs.lengths)) if outputs.sampling_logprobs is None else outputs.sampling_logprobs


def _likeliest(outputs: Outputs, tokens: slice) -> torch.Tensor | None:
    if outputs.logprobs is None:
        return None
    found = outputs.logprobs > -np.log(2) if outputs.likeliest is None else outputs.likeliest
    return torch.tensor(found[tokens] > 0)

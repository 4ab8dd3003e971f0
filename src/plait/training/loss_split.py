"""Whether a loss adds up: over the micro-batches of a mini-batch to what it is over the mini-batch as one.

A loss that ends in `.mean()` does not: as two micro-batches it is twice as large, so that `micro_batch_tokens`, which
is a matter of memory, changes the learning rate. To see that takes no model: the loss is called on samples of the run
with log-probs (values, scores) that are made up, as one micro-batch and as two, and the gradients are compared.

Shapes: R response tokens of the samples that are looked at, N these samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from plait.data.rows import FloatArray, Rows
from plait.dataflow import Level
from plait.errors import RunError
from plait.models.outputs import Outputs
from plait.policy.packing import MicroBatch
from plait.training.mini_batch import LossCall, MiniBatch
from plait.training.trainer_settings import SampleSettings
from plait.user_draws import draws_kept

MAX_SAMPLES = 16
"""As many are looked at, or one group more than fits."""
NOTHING = 1e-9
"""A gradient that is smaller says nothing."""


def split_gap(rows: Rows, call: LossCall, role: str, samples: SampleSettings) -> float | None:
    """How far the gradient of two micro-batches is from that of one: ‖Δ‖ / ‖one‖. 0 but for rounding where a loss adds
    up, 1 where it is a mean over the micro-batch.

    The random state of Python, NumPy and torch is left as it was.

    Args:
        rows: what the call trains on, with its columns; some of the samples are looked at.
        role: whose loss it is; every one but the actor is a scalar model, with values and scores.
        samples: how the rows came about.

    Returns:
        None where it cannot be told: too few samples, a loss that draws or keeps count, or that fails on such numbers.
    """
    members, cut = _chosen(rows, call.whole_groups)
    if not 0 < cut < len(members):
        return None
    chosen = rows.select(members)
    with draws_kept():
        for tables in (chosen, _with_columns_made_up(chosen, call)):  # in a step all advantages may be 0
            try:
                gap = _compared(MiniBatch(tables, call, role, samples), cut, is_scalar=role != "actor")
            except (RunError, RuntimeError):
                return None
            if gap is not None:
                return gap if math.isfinite(gap) else None
    return None


def _compared(batch: MiniBatch, cut: int, *, is_scalar: bool) -> float | None:
    """None: the gradient is nothing, or another each time."""
    everyone = range(len(batch.rows))
    once, again = (_gradient(batch, everyone, is_scalar) for _ in range(2))
    parts = _gradient(batch, everyone[:cut], is_scalar) + _gradient(batch, everyone[cut:], is_scalar)
    size = float(once.norm())
    if not torch.equal(once, again) or size < NOTHING:
        return None
    return float((parts - once).norm()) / size


def _gradient(batch: MiniBatch, members: Sequence[int], is_scalar: bool) -> Tensor:
    """The gradient of the loss of these samples as one micro-batch, by the outputs of all samples in turn."""
    rows = batch.rows
    places = torch.as_tensor(rows.token_places(list(members)))
    counts = (rows.num_tokens, len(rows))
    numbers_R, numbers_N = (torch.arange(count, dtype=torch.float32) for count in counts)
    if is_scalar:
        leaves = [torch.sin(0.9 * numbers_R), torch.cos(1.3 * numbers_N)]
    else:
        sampled_R = torch.as_tensor(rows.sampling_logprobs, dtype=torch.float32).nan_to_num(-1.0)
        leaves = [sampled_R + 0.05 * torch.sin(1.7 * numbers_R), 1 + 0.5 * torch.cos(2.3 * numbers_R)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    first = leaves[0][places]
    if is_scalar:
        outputs = Outputs(values_R=first, scores_N=leaves[1][list(members)])
    else:
        outputs = Outputs(first, leaves[1][places], (numbers_R % 3 == 0)[places], logprobs_at=partial(_spread, first))
    share = batch.share(MicroBatch(tuple((i,) for i in members), 0), outputs, needs_gradient=True)
    gradients = torch.autograd.grad(share, leaves, allow_unused=True)
    pairs = zip(leaves, gradients, strict=True)
    return torch.cat([torch.zeros_like(leaf) if grad is None else grad for leaf, grad in pairs]).double()


def _chosen(rows: Rows, whole_groups: bool) -> tuple[list[int], int]:
    """(places of the samples that are looked at, how many of them are the first micro-batch)."""
    if not whole_groups:
        lengths = np.diff(rows.offsets)
        members = [i for i in rows.order if lengths[i] > 0][:MAX_SAMPLES]
        return members, len(members) // 2
    groups: list[tuple[int, ...]] = []
    for uid in sorted(rows.groups):
        if sum(map(len, groups)) < MAX_SAMPLES:
            groups.append(rows.groups[uid])
    return [i for group in groups for i in group], sum(map(len, groups[: len(groups) // 2]))


def _with_columns_made_up(rows: Rows, call: LossCall) -> Rows:
    """Other numbers in the columns that the loss gets, none of them 0."""
    for column in call.columns.values():
        if column.level is not Level.BATCH:
            shape = rows.columns[column].shape
            numbers: FloatArray = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
            rows = rows.with_column(column, 0.3 + np.sin(1.1 * numbers))
    return rows


def _spread(numbers_R: Tensor, ids_RK: Tensor) -> Tensor:
    """Log-probs [R, K + 1] of a distribution that follows from these numbers, whichever tokens it is of."""
    outcomes_J = torch.arange(ids_RK.shape[1] + 1, dtype=numbers_R.dtype)
    return (numbers_R[:, None] * torch.cos(0.7 * outcomes_J)).log_softmax(-1)

"""One ragged step: any mix of prefill chunks and rows of 1 … k new tokens per sample, over the block pool.

Samples of few new tokens come first, longer chunks follow, those without a held context first: so attention takes them
(`ragged_context`).

Shapes: T new tokens of the step, S samples, M columns of the block tables, R rows that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from plait.data.host_device import uploaded

SHORT_ROWS = 16
"""New tokens of a sample up to which its rows go through the kernel; longer chunks pay for a gather of their keys."""


Part = tuple[range, range]
"""Rows, and samples, of a batch."""


@dataclass(frozen=True)
class RaggedBatch:
    """What goes through the model in one step. Tensors are on the model's device.

    Sample s has the rows starts[s] … starts[s + 1] − 1.
    """

    token_ids_T: Tensor
    """int64."""
    position_ids_T: Tensor
    """int64; held + depth, so siblings of a tree share a position."""
    starts_S1: Tensor
    """int32 [S + 1]."""
    held_S: Tensor
    """int32: tokens that the pool holds before the step."""
    tables_SM: Tensor
    """int32: block ids of each sample, −1 behind them."""
    places_T: Tensor
    """int64: block · P + offset of each new token."""
    num_new: tuple[int, ...]
    """New tokens of each sample, on the host."""
    num_held: tuple[int, ...]
    """`held_S` on the host."""
    ancestors: tuple[Tensor | None, ...] | None = None
    """Per sample a bool [k, k]: row i sees new token j (itself included). None: a causal chain."""
    read_R: Tensor | None = None
    """int64: rows whose logits are wanted; None: all."""
    inputs_TH: Tensor | None = None
    """Hidden states of the new tokens, from the stage of the model before this one; None on the first."""
    chunks_at: int | None = None
    """The row that samples of more than SHORT_ROWS begin at, if `num_new` says the most that others may have; None:
    behind those that it says."""
    has_head: bool = True
    """Whether logits are wanted; else the hidden states of all rows, as of a stage that is not the last."""
    is_replayed: bool = True
    """Whether a graph may compute it."""

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids_T.shape[0])

    @cached_property
    def num_short(self) -> int:
        """Samples, the first ones, whose rows go through the kernel."""
        if max(self.num_new, default=0) <= SHORT_ROWS:
            return len(self.num_new)
        short = [count <= SHORT_ROWS for count in self.num_new]
        assert short == sorted(short, reverse=True), "samples of few rows come first"
        return sum(short)

    @cached_property
    def num_short_rows(self) -> int:
        """Rows of these samples."""
        if self.chunks_at is not None:
            return self.chunks_at
        short = self.num_short
        return self.num_tokens if short == len(self.num_new) else sum(self.num_new[:short])

    @cached_property
    def parts(self) -> tuple[Part, Part]:
        """Samples of few new tokens, and the longer ones."""
        row, sample = self.num_short_rows, self.num_short
        return (range(row), range(sample)), (range(row, self.num_tokens), range(sample, len(self.num_new)))


@dataclass(frozen=True)
class NewTokens:
    """The rows of one sample, as the host says them."""

    token_ids: Sequence[int]
    held: int
    table: Sequence[int]
    ancestors: Tensor | None = None
    """bool [k, k] on any device; parents stand before children."""

    @property
    def rank(self) -> int:
        """Where it stands in the order of a RaggedContext: up to SHORT_ROWS rows, longer ones that hold nothing, longer
        ones that do."""
        return 0 if len(self.token_ids) <= SHORT_ROWS else 1 + (self.held > 0)


def ragged(
    samples: Sequence[NewTokens],
    block_tokens: int,
    *,
    device: torch.device | str = "cpu",
    read: Sequence[int] | None = None,
) -> RaggedBatch:
    """Put samples into one batch, in their order.

    Args:
        read: rows whose logits are wanted; None: all.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    starts = [0]
    for sample in samples:
        count = len(sample.token_ids)
        token_ids += sample.token_ids
        starts.append(len(token_ids))
        if sample.ancestors is None:
            positions += range(sample.held, sample.held + count)
        else:
            positions += (sample.ancestors.sum(1) - 1 + sample.held).tolist()
        for at in range(sample.held, sample.held + count):
            places.append(sample.table[at // block_tokens] * block_tokens + at % block_tokens)
    width = max((len(sample.table) for sample in samples), default=0)
    tables = [[*sample.table, *[-1] * (width - len(sample.table))] for sample in samples]
    trees = tuple(None if sample.ancestors is None else sample.ancestors.to(device) for sample in samples)
    whole = uploaded([token_ids, positions, places], torch.int64, device)
    return RaggedBatch(
        *whole[:2].unbind(0),
        starts_S1=uploaded(starts, torch.int32, device),
        held_S=uploaded([sample.held for sample in samples], torch.int32, device),
        tables_SM=uploaded(tables, torch.int32, device).view(len(samples), width),
        places_T=whole[2],
        num_new=tuple(len(sample.token_ids) for sample in samples),
        num_held=tuple(sample.held for sample in samples),
        ancestors=None if all(tree is None for tree in trees) else trees,
        read_R=None if read is None else uploaded(read, torch.int64, device),
    )


def with_chunks(rows: RaggedBatch | None, chunks: RaggedBatch, read: Sequence[int]) -> RaggedBatch:
    """One batch of both, the rows first.

    Args:
        read: rows of `chunks` whose logits are wanted; those of all `rows` are.
    """
    device = chunks.token_ids_T.device
    read_R = uploaded(read, torch.int64, device)
    if rows is None:
        return RaggedBatch(
            chunks.token_ids_T,
            chunks.position_ids_T,
            chunks.starts_S1,
            chunks.held_S,
            chunks.tables_SM,
            chunks.places_T,
            chunks.num_new,
            chunks.num_held,
            read_R=read_R,
        )
    count = rows.num_tokens
    width = max(rows.tables_SM.shape[1], chunks.tables_SM.shape[1])
    tables = [
        torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=-1)
        for tensor in (rows.tables_SM, chunks.tables_SM)
    ]
    return RaggedBatch(
        torch.cat([rows.token_ids_T, chunks.token_ids_T]),
        torch.cat([rows.position_ids_T, chunks.position_ids_T]),
        torch.cat([rows.starts_S1, chunks.starts_S1[1:] + count]),
        torch.cat([rows.held_S, chunks.held_S]),
        torch.cat(tables),
        torch.cat([rows.places_T, chunks.places_T]),
        (*rows.num_new, *chunks.num_new),
        (*rows.num_held, *chunks.num_held),
        read_R=torch.cat([torch.arange(count, device=device), read_R + count]),
    )

"""The tensors that a captured step reads and writes, and how a batch is laid into them.

Shapes: S samples, T rows (new tokens) of all of them, B rows of a graph, M columns of the block tables, H hidden size,
V vocabulary.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.generation.cuda_graphs import Graph
from plait.generation.ragged import SHORT_ROWS, RaggedBatch
from plait.generation.settings import MOST_REPLAYED
from plait.kernels.on_devices import power_of_two
from plait.policy.blocks import num_blocks_for

LEAST_COLUMNS = 8
"""Columns of the narrowest block tables: contexts of up to so many blocks have the same graphs."""


@dataclass(frozen=True)
class Size:
    """What batches that one graph serves have at most: powers of two, so that there are few graphs."""

    samples: int
    """Those that fill it up included."""
    rows: int
    width: int
    """Rows of a sample."""
    keys: int
    """That a sample has, its new ones included."""
    columns: int
    """That its block tables have: those of so many keys, however wide the tables of batches are."""

    @classmethod
    def of(cls, batch: RaggedBatch, block_tokens: int) -> Size:
        """The least that this batch goes into."""
        rows, width = power_of_two(batch.num_tokens), power_of_two(max(batch.num_new))
        idle = -(-(rows - batch.num_tokens) // width)  # samples that take the rows behind
        keys = power_of_two(max(map(operator.add, batch.num_new, batch.num_held)))
        columns = max(LEAST_COLUMNS, power_of_two(num_blocks_for(keys, block_tokens)))
        return cls(power_of_two(len(batch.num_new) + idle), rows, width, keys, columns)


@dataclass(eq=False)
class Step:
    """A graph, the tensors that it reads, and the one that it writes."""

    size: Size
    inputs: RaggedBatch
    graph: Graph = None  # type: ignore[assignment]  # until it is captured
    out_B: Tensor = None  # type: ignore[assignment]
    """Logits [B, V]; on a stage of the model that is not the last, hidden states [B, H]."""
    received_bytes: int = 0
    """That a replay receives from other ranks."""
    _rest: tuple[int, ...] = ()
    """What the rows behind were filled for: they stay as they are while batches stay as large."""

    @classmethod
    def of(cls, size: Size, batch: RaggedBatch) -> Step:
        """What is to be captured of such a batch. What its own batch says on the host holds for all batches of its
        graph: it counts no sample less than there may be of it."""
        device, given_TH = batch.token_ids_T.device, batch.inputs_TH

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        inputs = RaggedBatch(
            token_ids_T=zeros(torch.int64, size.rows),
            position_ids_T=zeros(torch.int64, size.rows),
            starts_S1=torch.arange(size.samples + 1, dtype=torch.int32, device=device),
            held_S=zeros(torch.int32, size.samples),
            tables_SM=zeros(torch.int32, size.samples, size.columns),
            places_T=zeros(torch.int64, size.rows),
            num_new=(size.width,) * size.samples,
            num_held=(size.keys - size.width,) * size.samples,
            inputs_TH=None if given_TH is None else given_TH.new_zeros(size.rows, given_TH.shape[1]),
        )
        return cls(size, inputs)

    def fill(self, batch: RaggedBatch, spare: int, block_tokens: int) -> None:
        """The rows of a batch, and behind them such as see the spare block alone."""
        own, size, rows, count = self.inputs, self.size, batch.num_tokens, len(batch.tables_SM)
        columns = min(size.columns, batch.tables_SM.shape[1])
        inputs_T = own.token_ids_T, own.position_ids_T, own.places_T
        for tensor, given in zip(inputs_T, (batch.token_ids_T, batch.position_ids_T, batch.places_T), strict=True):
            tensor[:rows].copy_(given)
        if own.inputs_TH is not None and batch.inputs_TH is not None:
            own.inputs_TH[:rows].copy_(batch.inputs_TH)
        own.held_S[:count].copy_(batch.held_S)
        own.tables_SM[:count, :columns].copy_(batch.tables_SM[:, :columns])
        rest = rows, count, columns, spare * block_tokens
        if rest != self._rest:
            self._rest = rest
            for tensor, behind in zip(inputs_T, (0, 0, spare * block_tokens), strict=True):
                tensor[rows:].fill_(behind)
            own.held_S[count:].fill_(0)
            own.tables_SM[:count, columns:].fill_(spare)
            own.tables_SM[count:].fill_(spare)
        if size.width == 1:
            return  # each sample begins where it did
        own.starts_S1[: count + 1].copy_(batch.starts_S1)
        behind = own.starts_S1[count + 1 :]
        torch.arange(1, len(behind) + 1, out=behind)
        behind.mul_(size.width).add_(batch.num_tokens).clamp_(max=size.rows)


def is_plain(batch: RaggedBatch) -> bool:
    """Whether a batch is what graphs are made for."""
    return batch.num_tokens <= MOST_REPLAYED and is_decoding(batch)


def is_decoding(batch: RaggedBatch) -> bool:
    """Whether each sample has a chain of few new tokens, and each is read."""
    return batch.ancestors is None and max(batch.num_new) <= SHORT_ROWS and batch.read_R is None

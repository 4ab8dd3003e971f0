"""The tensors that a captured step reads and writes, and how a batch is laid into them.

Samples of few new tokens stand in the first rows, longer ones (chunks of prompts) in rows of their own behind them.
Each of the two parts is filled up by itself, so both begin where they were captured.

Shapes: S samples, T rows (new tokens) of all of them, B rows of a graph, M columns of the block tables, H hidden size,
V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.generation.cuda_graphs import Graph
from plait.generation.pool import KVPool
from plait.generation.ragged import Part, RaggedBatch
from plait.generation.settings import MOST_REPLAYED, MOST_REPLAYED_CHUNKS
from plait.kernels.on_devices import power_of_two
from plait.policy.blocks import num_blocks_for

LEAST_COLUMNS = 8
"""Columns of the narrowest block tables: contexts of up to so many blocks have the same graphs."""

CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Dtype → how far a replay may be from the plain step, relative to its size: products of more rows round otherwise."""


Compute = Callable[[RaggedBatch, KVPool], Tensor | None]
"""Logits [R, V] of a batch; on a stage of a model that is not the last, and of a batch that has no head, hidden states
[T, H]."""
Readout = Callable[[Tensor, RaggedBatch], Tensor | None]
"""The same of the hidden states [T, H] behind the layers."""


@dataclass(frozen=True)
class Size:
    """What batches that one graph serves have at most: powers of two, so that there are few graphs."""

    samples: int
    """Those of few new tokens, those that fill them up included."""
    rows: int
    """That these samples have together."""
    width: int
    """Rows of one of them."""
    keys: int
    """That a sample has, its new ones included."""
    columns: int
    """That its block tables have: those of so many keys, however wide the tables of batches are."""
    chunks: int = 0
    """Samples of more new tokens, those that fill them up included."""
    chunk_rows: int = 0
    chunk_width: int = 0
    has_head: bool = True
    """Whether the graph includes the head. If only some rows are read, their logits are computed after it."""

    @classmethod
    def of(cls, batch: RaggedBatch, block_tokens: int) -> Size:
        """The least that this batch goes into."""
        short = _filled(batch.num_new[: batch.num_short], batch.num_short_rows)
        keys = power_of_two(max(map(operator.add, batch.num_new, batch.num_held)))
        columns = max(LEAST_COLUMNS, power_of_two(num_blocks_for(keys, block_tokens)))
        if batch.read_R is None:
            return cls(*short, keys, columns)
        chunks = _filled(batch.num_new[batch.num_short :], batch.num_tokens - batch.num_short_rows)
        return cls(*short, keys, columns, *chunks, has_head=False)


def _filled(num_new: Sequence[int], num_rows: int) -> tuple[int, int, int]:
    """Samples, rows, and rows of a sample, into which samples with so many rows go."""
    if not num_new:
        return 0, 0, 0
    rows, width = power_of_two(num_rows), power_of_two(max(num_new))
    idle = -(-(rows - num_rows) // width)  # samples that take the rows behind
    return power_of_two(len(num_new) + idle), rows, width


@dataclass(eq=False)
class Step:
    """A graph, the tensors that it reads, and the one that it writes."""

    size: Size
    inputs: RaggedBatch
    graph: Graph = None  # type: ignore[assignment]  # until it is captured
    out_B: Tensor = None  # type: ignore[assignment]
    """Logits [B, V]; of a graph without a head, and on a stage of the model that is not the last, hidden states
    [B, H]."""
    received_bytes: int = 0
    """That a replay receives from other ranks."""
    _rest: tuple[int, ...] = ()
    """What the rows behind were filled for: they stay as they are while batches stay as large."""

    @classmethod
    def of(cls, size: Size, batch: RaggedBatch) -> Step:
        """The step that is captured for batches of this size. The numbers on the host of its own batch are upper
        bounds, so that they hold for every batch that the graph is replayed for."""
        device, given_TH = batch.token_ids_T.device, batch.inputs_TH
        most_new = (*(size.width,) * size.samples, *(size.chunk_width,) * size.chunks)
        num_rows = size.rows + size.chunk_rows

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        inputs = RaggedBatch(
            token_ids_T=zeros(torch.int64, num_rows),
            position_ids_T=zeros(torch.int64, num_rows),
            starts_S1=torch.arange(len(most_new) + 1, dtype=torch.int32, device=device),
            held_S=zeros(torch.int32, len(most_new)),
            tables_SM=zeros(torch.int32, len(most_new), size.columns),
            places_T=zeros(torch.int64, num_rows),
            num_new=most_new,
            num_held=tuple(size.keys - count for count in most_new),
            inputs_TH=None if given_TH is None else given_TH.new_zeros(num_rows, given_TH.shape[1]),
            chunks_at=size.rows,
            has_head=size.has_head,
        )
        return cls(size, inputs)

    def fill(self, batch: RaggedBatch, spare: int, block_tokens: int) -> None:
        """The rows of a batch, and behind those of each part such as see the spare block alone."""
        size, columns = self.size, min(self.size.columns, batch.tables_SM.shape[1])
        rest = batch.num_short_rows, batch.num_short, batch.num_tokens, len(batch.num_new), columns, spare
        is_new, self._rest = rest != self._rest, rest
        widths = size.width, size.chunk_width
        for own, part, width in zip(self.inputs.parts, batch.parts, widths, strict=True):
            if not width:
                continue
            self._lay(batch, own, part, columns)
            if width > 1:  # else each sample begins where it did
                self._begin(batch, own, part, width)
            if is_new:
                self._fill_up(own, part, columns, spare, block_tokens)

    def _lay(self, batch: RaggedBatch, own: Part, part: Part, columns: int) -> None:
        """Copy a part of a batch to where it begins here."""
        inputs, (rows, samples) = self.inputs, part
        of, to = slice(rows.start, rows.stop), slice(own[0].start, own[0].start + len(rows))
        inputs.token_ids_T[to].copy_(batch.token_ids_T[of])
        inputs.position_ids_T[to].copy_(batch.position_ids_T[of])
        inputs.places_T[to].copy_(batch.places_T[of])
        if inputs.inputs_TH is not None and batch.inputs_TH is not None:
            inputs.inputs_TH[to].copy_(batch.inputs_TH[of])
        of, to = slice(samples.start, samples.stop), slice(own[1].start, own[1].start + len(samples))
        inputs.held_S[to].copy_(batch.held_S[of])
        inputs.tables_SM[to, :columns].copy_(batch.tables_SM[of, :columns])

    def _begin(self, batch: RaggedBatch, own: Part, part: Part, width: int) -> None:
        """Where the samples of a part begin, and those that fill it up: of so many rows, while there are any."""
        (own_rows, own_samples), (rows, samples) = own, part
        ends_S = self.inputs.starts_S1[own_samples.start + 1 : own_samples.stop + 1]
        given_S, behind_S = ends_S[: len(samples)], ends_S[len(samples) :]
        given_ends_S = batch.starts_S1[samples.start + 1 : samples.stop + 1]
        torch.add(given_ends_S, own_rows.start - rows.start, out=given_S)
        torch.arange(1, len(behind_S) + 1, out=behind_S)
        behind_S.mul_(width).add_(own_rows.start + len(rows)).clamp_(max=own_rows.stop)

    def _fill_up(self, own: Part, part: Part, columns: int, spare: int, block_tokens: int) -> None:
        """What is behind a part of a batch: rows and samples of nobody."""
        inputs, (rows, samples) = self.inputs, part
        behind = slice(own[0].start + len(rows), own[0].stop)
        inputs.token_ids_T[behind].fill_(0)
        inputs.position_ids_T[behind].fill_(0)
        inputs.places_T[behind].fill_(spare * block_tokens)
        idle = slice(own[1].start + len(samples), own[1].stop)
        inputs.held_S[idle].fill_(0)
        inputs.tables_SM[idle].fill_(spare)
        inputs.tables_SM[own[1].start : own[1].stop, columns:].fill_(spare)

    def out(self, batch: RaggedBatch) -> Tensor:
        """What the last replay gave for the rows of a batch, [T, V] or [T, H]."""
        short_TH = self.out_B[: batch.num_short_rows]
        num_long = batch.num_tokens - batch.num_short_rows
        return torch.cat([short_TH, self.out_B[self.size.rows :][:num_long]]) if num_long else short_TH


def has_graph(batch: RaggedBatch) -> bool:
    """Whether a batch is what graphs are made for: it decodes, perhaps beside prompts, as many rows as a graph has."""
    if batch.ancestors is not None or not batch.is_replayed:
        return False
    short_rows = batch.num_short_rows
    if batch.read_R is None:
        return batch.num_tokens == short_rows <= MOST_REPLAYED
    is_some = short_rows > 0 and len(batch.read_R) > 0
    return is_some and short_rows <= 2 * MOST_REPLAYED and batch.num_tokens - short_rows <= MOST_REPLAYED_CHUNKS


def is_decoding(batch: RaggedBatch) -> bool:
    """Whether each sample has a chain of few new tokens, and each is read."""
    return batch.ancestors is None and batch.read_R is None and batch.num_tokens == batch.num_short_rows


def difference(found_TV: Tensor, expected_TV: Tensor) -> str | None:
    """How logits, or hidden states, differ by more than rounding; None: they do not."""
    for found, expected in zip(found_TV.split(MOST_REPLAYED), expected_TV.split(MOST_REPLAYED), strict=True):
        off_norm, norm = torch.stack([(found.float() - expected.float()).norm(), expected.float().norm()]).tolist()
        off = off_norm / norm if norm else off_norm  # all are 0 behind a token whose embedding is 0
        if not off <= CLOSE[expected.dtype]:
            return f"compute numbers that are {off:.2g} of their size off"
    return None


def computed(out: Tensor | None) -> Tensor:
    """What a step computes of a batch of which something is read: [R, V] or [T, H]."""
    assert out is not None, "some row is read"
    return out

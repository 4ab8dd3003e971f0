"""The tensors that a captured step reads and writes, and how a batch is laid into them.

Samples of few new tokens stand in the first rows, longer ones (chunks of prompts) in rows of their own behind them.
Each of the two parts is filled up by itself, so both begin where they were captured.

Shapes: S samples, T rows (new tokens) of all of them, B rows of a graph, M columns of the block tables, H hidden size,
V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.generation.cuda_graphs import Graph
from plait.generation.pool import KVPool
from plait.generation.ragged import SHORT_ROWS, RaggedBatch
from plait.generation.settings import MOST_REPLAYED, MOST_REPLAYED_CHUNKS
from plait.kernels.on_devices import power_of_two
from plait.policy.blocks import num_blocks_for

LEAST_COLUMNS = 8
"""Columns of the narrowest block tables: contexts of up to so many blocks have the same graphs."""
LEAST_CHUNKS = 128
"""Rows of chunks in the smallest graph that has any."""

CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.03}
"""Dtype → how far a replay may be from the plain step, relative to its size: products of more rows round otherwise."""


Compute = Callable[[RaggedBatch, KVPool], Tensor | None]
"""Logits [R, V] of a batch; on a stage of a model that is not the last, and of a batch that has no head, hidden states
[T, H]."""
Said = Callable[[Tensor, RaggedBatch], Tensor | None]
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
    chunk_rows: int = 0
    """Rows of longer samples."""
    has_head: bool = True
    """Whether the graph computes logits. Where not each row is read, they are computed behind it, of those that are."""

    @classmethod
    def of(cls, batch: RaggedBatch, block_tokens: int) -> Size:
        """The least that this batch goes into."""
        short_rows = batch.num_short_rows
        rows, width = power_of_two(short_rows), power_of_two(max(batch.num_new[: batch.num_short]))
        idle = -(-(rows - short_rows) // width)  # samples that take the rows behind
        keys = power_of_two(max(map(operator.add, batch.num_new, batch.num_held)))
        columns = max(LEAST_COLUMNS, power_of_two(num_blocks_for(keys, block_tokens)))
        long_rows = batch.num_tokens - short_rows
        chunk_rows = max(LEAST_CHUNKS, power_of_two(long_rows)) if long_rows else 0
        has_head = batch.read_R is None
        return cls(power_of_two(batch.num_short + idle), rows, width, keys, columns, chunk_rows, has_head)

    @property
    def chunks(self) -> int:
        """Longer samples. Those of a batch have more than SHORT_ROWS rows each, so what fills them up is there, too."""
        return self.chunk_rows // SHORT_ROWS

    @property
    def chunk_width(self) -> int:
        """Rows of one of them."""
        return min(self.chunk_rows, self.keys)


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
    _rest: tuple[object, ...] = ()
    """What the rows behind were filled for: they stay as they are while batches stay as large."""

    @classmethod
    def of(cls, size: Size, batch: RaggedBatch) -> Step:
        """What is to be captured of such a batch. What its own batch says on the host holds for all batches of its
        graph: it counts no sample less than there may be of it."""
        device, given_TH = batch.token_ids_T.device, batch.inputs_TH
        most_new = (*(size.width,) * size.samples, *(size.chunk_width,) * size.chunks)
        num_rows = size.rows + size.chunk_rows

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        starts_S1 = torch.arange(len(most_new) + 1, dtype=torch.int32, device=device)
        inputs = RaggedBatch(
            token_ids_T=zeros(torch.int64, num_rows),
            position_ids_T=zeros(torch.int64, num_rows),
            starts_S1=starts_S1.clamp_(max=size.rows) if size.chunks else starts_S1,
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
        own, columns, place = self.inputs, min(self.size.columns, batch.tables_SM.shape[1]), spare * block_tokens
        rest = *batch.parts, columns, place
        is_new, self._rest = rest != self._rest, rest
        widths = self.size.width, max(batch.num_new)  # idle samples see no more blocks than the longest chunk
        for (own_rows, own_samples), (rows, samples), width in zip(own.parts, batch.parts, widths, strict=True):
            if not own_rows:
                continue
            to, of, at = _slice(own_rows), _slice(rows), _slice(own_samples)
            _lay(own.token_ids_T[to], batch.token_ids_T[of], 0, is_new=is_new)
            _lay(own.position_ids_T[to], batch.position_ids_T[of], 0, is_new=is_new)
            _lay(own.places_T[to], batch.places_T[of], place, is_new=is_new)
            _lay(own.held_S[at], batch.held_S[_slice(samples)], 0, is_new=is_new)
            tables_SM, given_SM = own.tables_SM[at], batch.tables_SM[_slice(samples)]
            _lay(tables_SM[:, :columns], given_SM[:, :columns], spare, is_new=is_new)
            if is_new:
                tables_SM[:, columns:].fill_(spare)
            if own.inputs_TH is not None and batch.inputs_TH is not None:
                own.inputs_TH[to][: len(rows)].copy_(batch.inputs_TH[of])
            if width > 1:  # else each sample begins where it did
                ends_S, first = own.starts_S1[1:][at], own_rows.start
                given_S, behind_S = ends_S[: len(samples)], ends_S[len(samples) :]
                torch.add(batch.starts_S1[1:][_slice(samples)], first - rows.start, out=given_S)
                torch.arange(1, len(behind_S) + 1, out=behind_S)
                behind_S.mul_(width).add_(first + len(rows)).clamp_(max=own_rows.stop)

    def out(self, batch: RaggedBatch) -> Tensor:
        """What the last replay gave for the rows of a batch, [T, V] or [T, H]."""
        given = [
            self.out_B[own_rows.start :][: len(rows)]
            for (own_rows, _), (rows, _) in zip(self.inputs.parts, batch.parts, strict=True)
        ]
        return torch.cat(given) if len(given[1]) else given[0]


def _slice(of: range) -> slice:
    return slice(of.start, of.stop)


def _lay(own: Tensor, given: Tensor, behind: int, *, is_new: bool) -> None:
    """[n, …] into the first of more; the rest is filled up."""
    own[: len(given)].copy_(given)
    if is_new:
        own[len(given) :].fill_(behind)


def has_graph(batch: RaggedBatch) -> bool:
    """Whether a batch is what graphs are made for: it decodes, perhaps beside prompts, as many rows as a graph has."""
    short_rows = batch.num_short_rows
    is_small = 0 < short_rows <= MOST_REPLAYED and batch.num_tokens - short_rows <= MOST_REPLAYED_CHUNKS
    return is_small and (is_decoding(batch) or _has_prompts(batch))


def is_decoding(batch: RaggedBatch) -> bool:
    """Whether each sample has a chain of few new tokens, and each is read."""
    return batch.ancestors is None and max(batch.num_new) <= SHORT_ROWS and batch.read_R is None


def _has_prompts(batch: RaggedBatch) -> bool:
    """Whether some of its rows are read."""
    return batch.ancestors is None and batch.read_R is not None and len(batch.read_R) > 0


def difference(found_TV: Tensor, expected_TV: Tensor) -> str | None:
    """How logits, or hidden states, differ by more than rounding; None: they do not."""
    for found, expected in zip(found_TV.split(MOST_REPLAYED), expected_TV.split(MOST_REPLAYED), strict=True):
        off_norm, norm = torch.stack([(found.float() - expected.float()).norm(), expected.float().norm()]).tolist()
        off = off_norm / norm if norm else off_norm  # all are 0 behind a token whose embedding is 0
        if not off <= CLOSE[expected.dtype]:
            return f"compute numbers that are {off:.2g} of their size off"
    return None


def given(out: Tensor | None) -> Tensor:
    """What a step computes of a batch of which something is read: [R, V] or [T, H]."""
    assert out is not None, "some row is read"
    return out

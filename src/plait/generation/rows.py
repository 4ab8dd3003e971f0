"""The running samples as tensors, kept up to date from step to step instead of being built anew.

Shapes: B running samples, M columns of the block tables.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from plait.generation.ragged import RaggedBatch
from plait.generation.sampler import SamplingRows
from plait.generation.settings import Sampling
from plait.policy.step import Key


class DecodeBatch:
    """Row i of the batch belongs to sample `keys[i]`; each is about to compute its newest token.

    Args:
        max_rows: samples that run at most.
    """

    def __init__(self, max_rows: int, block_tokens: int, device: torch.device) -> None:
        self._block_tokens = block_tokens
        self.keys: list[Key] = []
        self.samplings: list[Sampling] = []
        self._parameters: SamplingRows | None = None
        capacity = min(max_rows, 16)
        self._token_ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._held = torch.zeros(capacity, dtype=torch.int64, device=device)
        """Tokens that are held, which is also the position of the newest one."""
        self._noise_keys = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._drawn = torch.zeros(capacity, dtype=torch.int64, device=device)
        """Response tokens so far."""
        self._tables = torch.full((capacity, 8), -1, dtype=torch.int32, device=device)
        self._starts = torch.arange(capacity + 1, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self.keys)

    def append(
        self,
        keys: Sequence[Key],
        samplings: Sequence[Sampling],
        tables: Sequence[Sequence[int]],
        numbers: Sequence[tuple[int, int, int, int]],
    ) -> None:
        """Samples enter the batch.

        Args:
            numbers: of each the newest token's id, tokens held, noise key of the sample, response tokens drawn.
        """
        if not keys:
            return
        first = len(self.keys)
        self.keys += keys
        self.samplings += samplings
        self._parameters = None
        self._reserve(len(self.keys), max(map(len, tables)))
        rows = slice(first, len(self.keys))
        columns = torch.tensor(numbers, dtype=torch.int64, device=self._held.device).unbind(1)
        for tensor, column in zip((self._token_ids, self._held, self._noise_keys, self._drawn), columns, strict=True):
            tensor[rows] = column
        for row, table in enumerate(tables, first):
            self._set_table(row, table)

    def remove(self, keys: Collection[Key]) -> None:
        """Samples leave the batch; the others keep their order."""
        if not keys:
            return
        kept = [row for row, key in enumerate(self.keys) if key not in keys]
        self.keys = [self.keys[row] for row in kept]
        self.samplings = [self.samplings[row] for row in kept]
        self._parameters = None
        index = torch.tensor(kept, dtype=torch.int64, device=self._held.device)
        for tensor in (self._token_ids, self._held, self._noise_keys, self._drawn, self._tables):
            tensor[: len(kept)] = tensor[index]

    def clear(self) -> None:
        self.remove(tuple(self.keys))

    def set_tables(self, tables: dict[Key, list[int]]) -> None:
        """The block tables of these samples have changed in their last block or by one more."""
        if not tables:
            return
        self._reserve(len(self.keys), max(map(len, tables.values())))
        places, blocks = [], []
        width = self._tables.shape[1]
        for row, key in enumerate(self.keys):
            table = tables.get(key)
            if table is not None:
                places.append(row * width + len(table) - 1)
                blocks.append(table[-1])
        device = self._tables.device
        self._tables.view(-1)[torch.tensor(places, device=device)] = torch.tensor(
            blocks, dtype=torch.int32, device=device
        )

    def batch(self) -> RaggedBatch:
        """One row per sample; views, valid until the batch changes."""
        count = len(self.keys)
        held_B, tables_BM = self._held[:count], self._tables[:count]
        columns_B = held_B // self._block_tokens
        blocks_B = tables_BM.gather(1, columns_B[:, None])[:, 0]
        return RaggedBatch(
            token_ids_T=self._token_ids[:count],
            position_ids_T=held_B,
            starts_S1=self._starts[: count + 1],
            held_S=held_B.int(),
            tables_SM=tables_BM,
            places_T=blocks_B * self._block_tokens + (held_B - columns_B * self._block_tokens),
        )

    @property
    def draws(self) -> tuple[Tensor, Tensor]:
        """Noise keys of the samples [B] and the place in the response of the token that they draw next [B]."""
        return self._noise_keys[: len(self.keys)], self._drawn[: len(self.keys)]

    def parameters(self, vocab_size: int) -> SamplingRows:
        """Of the rows; they change only with the members."""
        if self._parameters is None:
            self._parameters = SamplingRows.of(self.samplings, vocab_size, self._held.device)
        return self._parameters

    def advance(self, token_ids_B: Tensor) -> None:
        """All rows have drawn a token."""
        count = len(self.keys)
        self._token_ids[:count] = token_ids_B
        self._held[:count] += 1
        self._drawn[:count] += 1

    def _set_table(self, row: int, table: Sequence[int]) -> None:
        self._tables[row] = -1
        self._tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32, device=self._tables.device)

    def _reserve(self, num_rows: int, num_columns: int) -> None:
        rows, columns = self._tables.shape
        if num_rows <= rows and num_columns <= columns:
            return
        new_rows = rows if num_rows <= rows else max(num_rows, 2 * rows)
        new_columns = columns if num_columns <= columns else max(num_columns, 2 * columns)
        tables = self._tables.new_full((new_rows, new_columns), -1)
        tables[:rows, :columns] = self._tables
        self._tables = tables
        self._token_ids, self._held, self._noise_keys, self._drawn = (
            torch.cat([tensor, tensor.new_zeros(new_rows - rows)])
            for tensor in (self._token_ids, self._held, self._noise_keys, self._drawn)
        )
        self._starts = torch.arange(new_rows + 1, dtype=torch.int32, device=self._starts.device)


def with_chunks(rows: RaggedBatch | None, chunks: RaggedBatch, read: Sequence[int]) -> RaggedBatch:
    """One batch of both, the rows first.

    Args:
        read: rows of `chunks` whose logits are wanted; those of all `rows` are.
    """
    device = chunks.token_ids_T.device
    read_R = torch.tensor(read, dtype=torch.int64, device=device)
    if rows is None:
        return RaggedBatch(
            chunks.token_ids_T,
            chunks.position_ids_T,
            chunks.starts_S1,
            chunks.held_S,
            chunks.tables_SM,
            chunks.places_T,
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
        read_R=torch.cat([torch.arange(count, device=device), read_R + count]),
    )

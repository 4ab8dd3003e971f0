"""The running samples as tensors, kept up to date from step to step instead of being built anew.

Shapes: B running samples, D tokens that they draw in a step, M columns of the block tables.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from plait.generation.ragged import SHORT_ROWS, NewTokens, RaggedBatch, ragged
from plait.generation.sampler import SamplingRows
from plait.generation.settings import Sampling
from plait.policy.blocks import num_blocks_for
from plait.policy.step import Key

Drafts = Mapping[Key, Sequence[int]]
"""Guesses of the tokens that samples draw next: a chain of at most SHORT_ROWS - 1."""

NO_DRAFTS: Drafts = MappingProxyType({})


class DecodeBatch:
    """Row i of the batch belongs to sample `keys[i]`; each is about to compute its newest token, and drafts behind it.

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
        self._computed = torch.zeros(capacity, dtype=torch.int64, device=device)
        """Tokens whose keys and values are there, which is also the position of the newest one."""
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
            numbers: of each the newest token's id, tokens computed, noise key of the sample, response tokens drawn.
        """
        if not keys:
            return
        first = len(self.keys)
        self.keys += keys
        self.samplings += samplings
        self._parameters = None
        self._reserve(len(self.keys), max(map(len, tables)))
        rows = slice(first, len(self.keys))
        columns = torch.tensor(numbers, dtype=torch.int64, device=self._computed.device).unbind(1)
        for tensor, column in zip(
            (self._token_ids, self._computed, self._noise_keys, self._drawn), columns, strict=True
        ):
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
        index = torch.tensor(kept, dtype=torch.int64, device=self._computed.device)
        for tensor in (self._token_ids, self._computed, self._noise_keys, self._drawn, self._tables):
            tensor[: len(kept)] = tensor[index]

    def clear(self) -> None:
        self.remove(tuple(self.keys))

    def set_tables(self, tables: Mapping[Key, Sequence[int]], num_new: int = 1) -> None:
        """The block tables of these samples have changed in the blocks that so many new tokens of each lie in."""
        if not tables:
            return
        self._reserve(len(self.keys), max(map(len, tables.values())))
        places, blocks = [], []
        width = self._tables.shape[1]
        changed = 1 + num_blocks_for(num_new - 1, self._block_tokens)
        for row, key in enumerate(self.keys):
            table = tables.get(key)
            if table is not None:
                last = table[-changed:]
                places += range(row * width + len(table) - len(last), row * width + len(table))
                blocks += last
        device = self._tables.device
        self._tables.view(-1)[torch.tensor(places, device=device)] = torch.tensor(
            blocks, dtype=torch.int32, device=device
        )

    def new_tokens(self, drafts: Drafts) -> list[NewTokens]:
        """The newest token of each row, on the host, and what is drafted behind it."""
        count = len(self.keys)
        numbers = zip(
            self.keys,
            self._token_ids[:count].tolist(),
            self._computed[:count].tolist(),
            self._tables[:count].tolist(),
            strict=True,
        )
        new = []
        for key, newest, computed, table in numbers:
            token_ids = (newest, *drafts.get(key, ()))
            assert len(token_ids) <= SHORT_ROWS, f"a draft of {len(token_ids) - 1} tokens"
            new.append(NewTokens(token_ids, computed, [block for block in table if block >= 0]))
        return new

    def batch(self, drafts: Drafts) -> RaggedBatch:
        """`ragged` of `new_tokens`; without drafts views in its place, which are valid until the batch changes."""
        if drafts:
            return ragged(self.new_tokens(drafts), self._block_tokens, device=self._computed.device)
        count = len(self.keys)
        computed_B, tables_BM = self._computed[:count], self._tables[:count]
        columns_B = computed_B // self._block_tokens
        blocks_B = tables_BM.gather(1, columns_B[:, None])[:, 0]
        return RaggedBatch(
            token_ids_T=self._token_ids[:count],
            position_ids_T=computed_B,
            starts_S1=self._starts[: count + 1],
            held_S=computed_B.int(),
            tables_SM=tables_BM,
            places_T=blocks_B * self._block_tokens + (computed_B - columns_B * self._block_tokens),
        )

    def draws(self, num_new: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Noise keys of the samples [D] and the places in the response of the tokens that they draw next [D].

        Args:
            num_new: of each row, how many.
        """
        count = len(self.keys)
        noise_keys_B, places_B = self._noise_keys[:count], self._drawn[:count]
        if sum(num_new) == count:
            return noise_keys_B, places_B
        counts_B = torch.tensor(num_new, dtype=torch.int64, device=places_B.device)
        further_D = torch.cat([torch.arange(count, device=places_B.device) for count in num_new])
        return noise_keys_B.repeat_interleave(counts_B), places_B.repeat_interleave(counts_B) + further_D

    def parameters(self, vocab_size: int) -> SamplingRows:
        """Sampling parameters of the rows; they change only with the members."""
        if self._parameters is None:
            self._parameters = SamplingRows.of(self.samplings, vocab_size, self._computed.device)
        return self._parameters

    def advance(self, newest_B: Tensor, num_drawn_B: Tensor | int) -> None:
        """All rows have drawn tokens: so many each (or all as many), with these ids the last ones."""
        count = len(self.keys)
        self._token_ids[:count] = newest_B
        self._computed[:count] += num_drawn_B
        self._drawn[:count] += num_drawn_B

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
        self._token_ids, self._computed, self._noise_keys, self._drawn = (
            torch.cat([tensor, tensor.new_zeros(new_rows - rows)])
            for tensor in (self._token_ids, self._computed, self._noise_keys, self._drawn)
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

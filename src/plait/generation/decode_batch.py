"""The running samples as tensors, kept up to date from step to step instead of being built anew.

Shapes: B running samples, D tokens that they draw in a step, M columns of the block tables.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.data.host_device import uploaded
from plait.generation.ragged import SHORT_ROWS, NewTokens, RaggedBatch
from plait.generation.sampler import SamplingRows
from plait.policy.blocks import num_blocks_for
from plait.policy.step import Key
from plait.speculation.drafter import SampledBy

Drafts = Mapping[Key, Sequence[int]]
"""Drafts of the tokens that samples draw next: a chain of at most SHORT_ROWS - 1."""

NO_DRAFTS: Drafts = MappingProxyType({})

UNKNOWN = -1
"""In place of the id of a newest token that the host does not know yet."""


class DecodeBatch:
    """Row i of the batch belongs to sample `keys[i]`; each is about to compute its newest token, and drafts behind it.

    Args:
        max_rows: samples that run at most.
    """

    def __init__(self, max_rows: int, block_tokens: int, device: torch.device) -> None:
        self._block_tokens = block_tokens
        self.keys: list[Key] = []
        self.samplings: list[SampledBy] = []
        self._parameters: SamplingRows | None = None
        self._newest: list[int] = []
        self._held: list[int] = []
        """The newest token of each row, where the host knows it (`know`), and the tokens computed, on the host: it need
        not ask the device."""
        self._host_tables: list[list[int]] = []
        capacity = max_rows if device.type != "cpu" else min(max_rows, 16)
        self.numbers = torch.zeros((4, capacity), dtype=torch.int64, device=device)
        """int64 [4, room for rows]: noise key, newest token, tokens whose keys and values are there (which is also the
        position of the newest one), response tokens drawn. They stay where they lie while the rows fit."""
        self._tables = torch.full((capacity, 8), -1, dtype=torch.int32, device=device)
        self._starts = torch.arange(capacity + 1, dtype=torch.int32, device=device)

    def __len__(self) -> int:
        return len(self.keys)

    def append(
        self,
        keys: Sequence[Key],
        samplings: Sequence[SampledBy],
        tables: Sequence[Sequence[int]],
        numbers: Sequence[tuple[int, int, int, int]],
        newest_B: Tensor | None = None,
    ) -> None:
        """Samples enter the batch.

        Args:
            numbers: of each the noise key of the sample, the newest token's id, tokens computed, response tokens drawn.
            newest_B: int64 [B]; the newest tokens' ids, if the host does not know them.
        """
        if not keys:
            return
        first = len(self.keys)
        self.keys += keys
        self.samplings += samplings
        self._parameters = None
        self._reserve(len(self.keys), max(map(len, tables)))
        rows = slice(first, len(self.keys))
        self._newest += [newest for _, newest, _, _ in numbers]
        self._held += [held for _, _, held, _ in numbers]
        self._host_tables += [list(table) for table in tables]
        self.numbers[:, rows] = uploaded(numbers, torch.int64, self.numbers.device).T
        if newest_B is not None:
            self.numbers[1, rows] = newest_B
        width = self._tables.shape[1]
        padded = [[*table, *[-1] * (width - len(table))] for table in tables]
        self._tables[rows] = uploaded(padded, torch.int32, self._tables.device)

    def remove(self, keys: Collection[Key]) -> None:
        """Samples leave the batch; the others keep their order."""
        if not keys:
            return
        kept = [row for row, key in enumerate(self.keys) if key not in keys]
        self._take_host(self, kept)
        self._parameters = None
        index = uploaded(kept, torch.int64, self.numbers.device)
        self.numbers[:, : len(kept)] = self.numbers[:, index]
        self._tables[: len(kept)] = self._tables[index]

    def clear(self) -> None:
        self.remove(tuple(self.keys))

    def part(self, keys: Sequence[Key]) -> DecodeBatch:
        """The rows of these samples, in this order: this batch itself if that is how it has them, else a copy."""
        if list(keys) == self.keys:
            return self
        rows = self._places(keys)
        index = uploaded(rows, torch.int64, self.numbers.device)
        part = DecodeBatch(len(keys), self._block_tokens, self.numbers.device)
        part._take_host(self, rows)
        part.numbers, part._tables, part._starts = self.numbers[:, index], self._tables[index], self._starts
        return part

    def _take_host(self, batch: DecodeBatch, rows: Sequence[int]) -> None:
        """Have these rows of a batch, on the host."""
        self.keys = [batch.keys[row] for row in rows]
        self.samplings = [batch.samplings[row] for row in rows]
        self._newest = [batch._newest[row] for row in rows]
        self._held = [batch._held[row] for row in rows]
        self._host_tables = [batch._host_tables[row] for row in rows]

    def _places(self, keys: Sequence[Key]) -> list[int]:
        """The rows of these samples."""
        rows = {key: row for row, key in enumerate(self.keys)}
        return [rows[key] for key in keys]

    def set_tables(self, tables: Mapping[Key, Sequence[int]], num_new: int) -> None:
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
                self._host_tables[row] = list(table)
                last = table[-changed:]
                places += range(row * width + len(table) - len(last), row * width + len(table))
                blocks += last
        device = self._tables.device
        self._tables.view(-1)[uploaded(places, torch.int64, device)] = uploaded(blocks, torch.int32, device)

    def new_tokens(self, drafts: Drafts) -> list[NewTokens]:
        """The newest token of each row, and what is drafted behind it, as the host knows them."""
        new = []
        for key, newest, held, table in zip(self.keys, self._newest, self._held, self._host_tables, strict=True):
            token_ids = (newest, *drafts.get(key, ()))
            assert len(token_ids) <= SHORT_ROWS, f"a draft of {len(token_ids) - 1} tokens"
            new.append(NewTokens(token_ids, held, table))
        return new

    def batch(self, drafts: Drafts) -> RaggedBatch:
        """What `ragged` makes of `new_tokens`, with tables as wide as there is room for. Tables, and without drafts the
        rest, are views, which are valid until the batch changes."""
        if drafts:
            return self._drafted(drafts)
        count = len(self.keys)
        _, newest_B, computed_B, _ = self.numbers[:, :count].unbind(0)
        tables_BM = self._tables[:count]
        blocks_B = tables_BM.gather(1, (computed_B // self._block_tokens)[:, None])[:, 0]
        return RaggedBatch(
            token_ids_T=newest_B,
            position_ids_T=computed_B,
            starts_S1=self._starts[: count + 1],
            held_S=computed_B.int(),
            tables_SM=tables_BM,
            places_T=torch.add(computed_B % self._block_tokens, blocks_B, alpha=self._block_tokens),
            num_new=(1,) * count,
            num_held=tuple(self._held),
        )

    def _drafted(self, drafts: Drafts) -> RaggedBatch:
        """`batch` with drafts. The tables stand where they are: to say those of long contexts anew would take longer
        than all else that the host does for a step."""
        count, device = len(self.keys), self.numbers.device
        new = [(newest, *drafts.get(key, ())) for key, newest in zip(self.keys, self._newest, strict=True)]
        num_new = tuple(map(len, new))
        assert max(num_new) <= SHORT_ROWS, f"a draft of {max(num_new) - 1} tokens"
        numbers = np.stack([np.fromiter(chain.from_iterable(new), np.int64), *_places_of(num_new)])
        token_ids_T, rows_T, further_T = uploaded(numbers, torch.int64, device).unbind(0)
        computed_B, tables_BM = self.numbers[2, :count], self._tables[:count]
        positions_T = computed_B[rows_T] + further_T
        blocks_T = tables_BM[rows_T, positions_T // self._block_tokens]
        return RaggedBatch(
            token_ids_T=token_ids_T,
            position_ids_T=positions_T,
            starts_S1=uploaded([0, *accumulate(num_new)], torch.int32, device),
            held_S=computed_B.int(),
            tables_SM=tables_BM,
            places_T=torch.add(positions_T % self._block_tokens, blocks_T, alpha=self._block_tokens),
            num_new=num_new,
            num_held=tuple(self._held),
        )

    def draws(self, num_new: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Noise keys of the samples [D] and the places in the response of the tokens that they draw next [D].

        Args:
            num_new: of each row, how many.
        """
        count = len(self.keys)
        noise_keys_B, _, _, places_B = self.numbers[:, :count].unbind(0)
        if sum(num_new) == count:
            return noise_keys_B, places_B
        rows_D, further_D = uploaded(np.stack(_places_of(num_new)), torch.int64, places_B.device).unbind(0)
        return noise_keys_B[rows_D], places_B[rows_D] + further_D

    def parameters(self, vocab_size: int) -> SamplingRows:
        """Sampling parameters of the rows; they change only with the members."""
        if self._parameters is None:
            self._parameters = SamplingRows.of(self.samplings, vocab_size, self.numbers.device)
        return self._parameters

    def advance(self, keys: Sequence[Key], newest: Sequence[int], num_drawn: Sequence[int]) -> None:
        """The rows of these samples have drawn tokens: so many each, with these ids the last ones."""
        newest_B, drawn_B = uploaded([newest, num_drawn], torch.int64, self.numbers.device).unbind(0)
        self._advance(keys, num_drawn, newest_B, drawn_B)
        self.know(keys, newest)

    def go_ahead(self, keys: Sequence[Key], newest_B: Tensor) -> None:
        """The rows of these samples have drawn a token each, with these ids, int64 [B]; the host need not know them."""
        self._advance(keys, (1,) * len(keys), newest_B, 1)

    def know(self, keys: Sequence[Key], newest: Sequence[int]) -> None:
        """These are the ids of the newest tokens of these samples' rows."""
        if list(keys) == self.keys:
            self._newest = list(newest)
            return
        for place, token_id in zip(self._places(keys), newest, strict=True):
            self._newest[place] = token_id

    def _advance(self, keys: Sequence[Key], num_drawn: Sequence[int], newest_B: Tensor, drawn_B: Tensor | int) -> None:
        rows: slice | Tensor = slice(len(self.keys))
        if list(keys) == self.keys:
            self._held = list(map(operator.add, self._held, num_drawn))
        else:
            places = self._places(keys)
            for place, number in zip(places, num_drawn, strict=True):
                self._held[place] += number
            rows = uploaded(places, torch.int64, self.numbers.device)
        self.numbers[1, rows] = newest_B
        self.numbers[2:, rows] += drawn_B

    def _reserve(self, num_rows: int, num_columns: int) -> None:
        rows, columns = self._tables.shape
        if num_rows <= rows and num_columns <= columns:
            return
        new_rows = rows if num_rows <= rows else max(num_rows, 2 * rows)
        new_columns = columns if num_columns <= columns else max(num_columns, 2 * columns)
        tables = self._tables.new_full((new_rows, new_columns), -1)
        tables[:rows, :columns] = self._tables
        self._tables = tables
        self.numbers = torch.cat([self.numbers, self.numbers.new_zeros(4, new_rows - rows)], dim=1)
        self._starts = torch.arange(new_rows + 1, dtype=torch.int32, device=self._starts.device)


def _places_of(num_new: Sequence[int]) -> tuple[np.ndarray[Any, np.dtype[np.int64]], ...]:
    """The row of each token, and how many tokens of that row stand before it: int64 [D] each.

    Args:
        num_new: tokens of each row.
    """
    counts_B = np.array(num_new, np.int64)
    firsts_B = counts_B.cumsum() - counts_B
    return np.arange(len(counts_B)).repeat(counts_B), np.arange(counts_B.sum()) - firsts_B.repeat(counts_B)

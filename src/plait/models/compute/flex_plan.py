"""Attention over a packed row by one kernel: torch's FlexAttention, on devices for which torch compiles it.

The row is looked at in blocks of 128 tokens. Those in which no query sees a key are left out, those in which every
query sees every key are computed without asking, and for the rest the kernel asks the rule of `visibility`. Which are
which follows from the least and the greatest number of each block, so it is counted on the host and waits for no
device.

Shapes: T tokens of the row, b blocks of them, Hq query heads, Hkv key heads, D head size of queries and keys, E of
values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from plait.data.host_device import uploaded
from plait.data.packed import PackedBatch
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.visibility import Array, Places, places, sees

BLOCK = 128
"""Tokens of a block: FlexAttention's own default."""

BACKEND = "inductor"

SMALLEST_HEAD = 16
"""FlexAttention's kernels refuse smaller heads."""

MOST_KINDS = 128
"""Kinds of calls that the kernel may be compiled for: with and without gradients, a window, a softcap, for numbers of
heads, dtypes, and rows of one block. Torch's own limit is 8, beyond which it computes all scores of a row at once."""

Kernel = Callable[..., Any]


def blocks(row: Places, window: int | None) -> tuple[Any, Any]:
    """Masks [b, b] over blocks of queries and keys: where some query may see some key, and where all see all."""
    length = len(row.position)
    low, high = (Places(*(_by_block(column, reduce) for column in row)) for reduce in (np.minimum, np.maximum))
    number = np.arange(len(low.position))
    some = _share(low.group, high.group) & (_share(low.segment, high.segment) | (high.prompt == 1)[None, :])
    some |= (high.root == 1)[None, :]
    some &= (number[None, :] <= number[:, None]) & (low.position[None, :] <= high.position[:, None])
    every = _are_one(low.group, high.group) & (_are_one(low.segment, high.segment) | (low.prompt == 1)[None, :])
    every |= (low.root == 1)[None, :]
    every &= high.position[None, :] <= low.position[:, None]
    if window is not None:
        some &= low.position[:, None] - high.position[None, :] < window
        every &= high.position[:, None] - low.position[None, :] < window
    if length % BLOCK:  # the last block goes beyond the row
        every[-1, :] = every[:, -1] = False
    return some, every


def _by_block(column: Array, reduce: Any) -> Array:
    return reduce.reduceat(column, np.arange(0, len(column), BLOCK))


def _share(low: Array, high: Array) -> Any:
    """[b, b]: whether a number lies in the ranges of both blocks."""
    return (low[None, :] <= high[:, None]) & (low[:, None] <= high[None, :])


def _are_one(low: Array, high: Array) -> Any:
    """[b, b]: whether both blocks hold one number alone, the same."""
    return (low == high)[:, None] & (low == high)[None, :] & (low[:, None] == low[None, :])


def block_mask(batch: PackedBatch, window: int | None) -> BlockMask:
    """The rule and the blocks, on the batch's device."""
    row, device = places(batch), batch.token_ids_T.device
    some, every = blocks(row, window)
    at = Places(*(uploaded(column, torch.int32, device) for column in row))

    def rule(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return sees(at.of(query), at.of(key), window)

    tables = (*_listed(some & ~every), *_listed(every))
    lists = (uploaded(table, torch.int32, device)[None, None] for table in tables)
    length = len(row.position)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(length, length))


def _listed(chosen: Any) -> tuple[Array, Array]:
    """How many blocks each row of blocks has, [b], and which, [b, b]: those first."""
    return chosen.sum(1, dtype=np.int32), np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)


@dataclass(frozen=True)
class FlexPlan:
    """What every layer of one window does with the batch."""

    mask: BlockMask
    kernel: Kernel

    @classmethod
    def of(cls, batch: PackedBatch, window: int | None, kernel: Kernel | None = None) -> FlexPlan:
        """
        Args:
            kernel: `flex_attention`, compiled unless it is given.
        """
        return cls(block_mask(batch, window), kernel or compiled())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """See `row_attention.RowPlan`: [Hq, T, D], [Hkv, T, D] and [Hkv, T, E] to [T, Hq, E]."""
        group = query.shape[0] // key.shape[0]
        key, value = (_for_each(tensor, group) for tensor in (key, value))
        # Scale and softcap are written into the kernel: torch cannot trace a softcap that is an argument of it.
        with torch._dynamo.config.patch(specialize_float=True, recompile_limit=MOST_KINDS):
            out, sums = self.kernel(
                query[None],
                key[None],
                value[None],
                score_mod=None if form.softcap is None else _capped(form.softcap),
                block_mask=self.mask,
                scale=form.scale,
                return_aux=AuxRequest(lse=True),
                kernel_options={"BACKEND": "TRITON"},  # of short rows, too: it is the one that is proven
            )
        if form.sinks is not None:  # one further score in the sum: its share of the weight is taken off
            out = out * torch.sigmoid(sums.lse - form.sinks[None, :, None]).to(out.dtype)[..., None]
        return out[0].transpose(0, 1)


def _for_each(tensor: Tensor, group: int) -> Tensor:
    """[Hkv · group, T, …]: keys or values once for each query head that shares them.

    In its backward the kernel gives a block of keys to one program, with all rows and all query heads that see them: of
    a prompt that many responses share these are most of the row, one after another. On an H100 the backward of a layer
    took 2 ms where its products take 0.2 (8 responses of 500 tokens each, 6 query heads to a key head)."""
    if group == 1:
        return tensor
    return tensor[:, None].expand(-1, group, *tensor.shape[1:]).flatten(0, 1)


@cache
def compiled(backend: str | Kernel = BACKEND) -> Kernel:
    """Compiled for rows of any length.

    Args:
        backend: of `torch.compile`.
    """
    return torch.compile(flex_attention, backend=backend, dynamic=True, fullgraph=True)


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, *place: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped

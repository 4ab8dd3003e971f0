"""The keys and values of everything in flight: one pool of equal blocks per layer.

Which block holds what is decided in `policy.blocks`; here lie the tensors. A token's *place* is its block's id times
the tokens of a block plus its offset there. Buffers start as zeros: a masked place still enters a product, with weight
0, and what lies there must be finite. The whole pool has addresses from the start, which stay until it is given back:
on a GPU as memory that is taken at once, on a CPU as pages that are taken as they are written. (On a CPU whose system
has no such pages it grows by copying, layer by layer.) It is given back as a whole.

Shapes: N blocks of P tokens, T tokens of a step, K tokens of a context, Hkv key heads, D and E head sizes of keys and
of values, X experts for each token.
"""

from __future__ import annotations

import math
import mmap
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plait.data.host_device import uploaded
from plait.generation.states import StatePool
from plait.kernels import device_attention, on_devices
from plait.policy.blocks import BLOCK_TOKENS, prefix_keys


@dataclass(frozen=True)
class KeyValue:
    """One layer's keys and values: key [..., Hkv, tokens, D] and value [..., Hkv, tokens, E] in the compute dtype."""

    key: Tensor
    value: Tensor


class KVPool:
    """Blocks of all layers; `layers` holds key [N, Hkv, P, D] and value [N, Hkv, P, E] of each, contiguous, and
    `experts` [N, 1, P, X] int16 of each that is a mixture: those to which its tokens went.

    The shapes of a layer are learned from its first tokens.

    Args:
        states: of the layers that keep none; None: all layers attend.
        keeps_experts: whether somebody asks which experts tokens went to.
    """

    def __init__(
        self, block_tokens: int = BLOCK_TOKENS, states: StatePool | None = None, *, keeps_experts: bool = False
    ) -> None:
        self.block_tokens = block_tokens
        self.states = states
        self.keeps_experts = keeps_experts
        self.num_blocks = 0
        """That may be used."""
        self.layers: dict[int, KeyValue] = {}
        self.experts: dict[int, Tensor] = {}
        self._limit = 0
        self._in_place = True
        """Whether all layers have addresses for all blocks up to the limit."""
        self._by_page = True
        """Whether they take memory as they are written."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that may be used, used or not; of all, where they are taken at once. States included."""
        tensors = self._tensors
        of_states = 0 if self.states is None else self.states.num_bytes
        if not self._by_page:
            return of_states + sum(tensor.nbytes for tensor in tensors)
        return of_states + sum(tensor[: self.num_blocks].nbytes for tensor in tensors)

    @property
    def _tensors(self) -> list[Tensor]:
        """All that holds blocks [N, …]."""
        return [*(tensor for kv in self.layers.values() for tensor in (kv.key, kv.value)), *self.experts.values()]

    @property
    def spare(self) -> int | None:
        """A block behind all others, which no sample has: rows that stand for nobody write to it. None: there is none,
        or no layer yet."""
        return self._limit if self.layers and self._in_place else None

    def addresses(self) -> tuple[int, ...]:
        """Where the layers lie."""
        return tuple(tensor.data_ptr() for tensor in self._tensors)

    def reserve(self, num_blocks: int, limit: int) -> None:
        """Have blocks 0 … num_blocks − 1 at least; what is copied to grow grows by half.

        Args:
            limit: of num_blocks; the same until `clear`.
        """
        assert num_blocks <= limit, f"{num_blocks} blocks needed, {limit} is the limit"
        assert self._limit in (0, limit), f"a pool of {self._limit} blocks at most, {limit} are asked for"
        self._limit = limit
        if num_blocks <= self.num_blocks:
            return
        if not self._in_place:
            num_blocks = min(max(num_blocks, self.num_blocks + self.num_blocks // 2), limit)
            for layer, old in self.layers.items():
                self.layers[layer] = KeyValue(_enlarged(old.key, num_blocks), _enlarged(old.value, num_blocks))
            self.experts = {layer: _enlarged(old, num_blocks) for layer, old in self.experts.items()}
        self.num_blocks = num_blocks

    def layer(self, layer: int, key: Tensor, value: Tensor) -> KeyValue:
        """The blocks of a layer; `key` [Hkv, T, D] and `value` [Hkv, T, E] say their shapes where it is new."""
        if layer not in self.layers:
            self.layers[layer] = KeyValue(self._zeros(key), self._zeros(value))
        return self.layers[layer]

    def names(self, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """By which sequences that begin with these tokens find the full blocks that others have computed; none where
        layers are recurrent: of those there are only the ones behind a sequence."""
        return prefix_keys(token_ids, self.block_tokens) if self.states is None else ()

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in all layers; no target is a source."""
        tensors = self._tensors
        if not pairs or not tensors:
            return
        sources, targets = uploaded(pairs, torch.int64, tensors[0].device).unbind(1)
        for tensor in tensors:
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def read(self, layer: int, places: Places) -> KeyValue:
        """Copies [Hkv, T, …] of what stands in places of a layer."""
        return places.load(self.layers[layer])

    def read_experts(self, layer: int, places_T: Tensor) -> Tensor:
        """A copy [T, X] int16 of the experts that tokens in these places went to in a layer."""
        blocks = self.experts[layer]
        return blocks.view(-1, blocks.shape[3]).index_select(0, places_T)

    def write(self, layer: int, places: Places, key: Tensor, value: Tensor) -> None:
        """Put key [Hkv, T, D] and value [Hkv, T, E] of tokens where they belong."""
        places.store(self.layer(layer, key, value), key, value)

    def write_experts(self, layer: int, places_T: Tensor, experts_TX: Tensor) -> None:
        """Note the experts that tokens go to, integers, where they belong."""
        new_1TX = experts_TX.to(torch.int16)[None]
        if layer not in self.experts:
            self.experts[layer] = self._zeros(new_1TX)
        self.experts[layer].view(-1, new_1TX.shape[2]).index_copy_(0, places_T, new_1TX[0])

    def clear(self, *, keep_memory: bool = False) -> None:
        """Hold nothing, and give the memory back.

        Args:
            keep_memory: that of a GPU stays for the next time, at its addresses and zeros again; what is taken page by
                page goes.
        """
        if self.states is not None:
            self.states.clear()
        if keep_memory and not self._by_page:
            if self.num_blocks == 0:
                return
            for tensor in self._tensors:
                tensor[: self.num_blocks].zero_()
                tensor[self._limit :].zero_()  # the spare block
            self.num_blocks = 0
            return
        self.layers.clear()
        self.experts.clear()
        self.num_blocks, self._limit, self._in_place, self._by_page = 0, 0, True, True

    def _zeros(self, like: Tensor) -> Tensor:
        num_heads, _, head_size = like.shape
        sizes = (num_heads, self.block_tokens, head_size)
        if not takes_pages(like.device):
            self._by_page = False
            return like.new_zeros(self._limit + 1, *sizes)
        if self._in_place:
            zeros = _addresses((self._limit + 1, *sizes), like.dtype)
            if zeros is not None:
                return zeros
        self._in_place = False
        return like.new_zeros(self.num_blocks, *sizes)


def takes_pages(device: torch.device) -> bool:
    """Whether memory is taken when it is written, not at once."""
    return device.type == "cpu"


def places_of(table: Sequence[int], start: int, stop: int, block_tokens: int) -> NDArray[np.int64]:
    """Places [stop − start] of the tokens start … stop − 1 of a context with this block table."""
    at = np.arange(start, stop)
    return np.asarray(table, dtype=np.int64)[at // block_tokens] * block_tokens + at % block_tokens


class Places:
    """Where keys and values of tokens belong, in every layer of a pool.

    Args:
        places_T: int64, block · P + offset in it.
        block_tokens: P.
    """

    def __init__(self, places_T: Tensor, block_tokens: int) -> None:
        self.places_T, self._block_tokens = places_T, block_tokens
        self._rows: dict[int, Tensor] = {}

    @classmethod
    def of(cls, table: Sequence[int], start: int, stop: int, block_tokens: int, device: torch.device) -> Self:
        """Those of the tokens start … stop − 1 of a context with this block table."""
        return cls(uploaded(places_of(table, start, stop, block_tokens), torch.int64, device), block_tokens)

    def store(self, kv: KeyValue, key: Tensor, value: Tensor) -> None:
        """Put key [Hkv, T, D] and value [Hkv, T, E] there."""
        if key.device.type == "cuda" and on_devices.AVAILABLE:
            device_attention.store(kv.key, kv.value, self.places_T, key, value)
            return
        rows_HT = self._rows_of(key.shape[0])
        for tensor, new in ((kv.key, key), (kv.value, value)):
            tensor.view(-1, new.shape[2]).index_copy_(0, rows_HT, new.reshape(-1, new.shape[2]))

    def load(self, kv: KeyValue) -> KeyValue:
        """Copies [Hkv, T, D] and [Hkv, T, E] of what stands there."""
        num_heads = kv.key.shape[1]
        rows_HT = self._rows_of(num_heads)
        read = (tensor.view(-1, tensor.shape[3]).index_select(0, rows_HT) for tensor in (kv.key, kv.value))
        return KeyValue(*(rows.view(num_heads, -1, rows.shape[1]) for rows in read))

    def _rows_of(self, num_heads: int) -> Tensor:
        """[Hkv · T] rows of a layer's tensor seen as [N · Hkv · P, D], in the order of keys [Hkv, T, D]."""
        if num_heads not in self._rows:
            blocks_T = self.places_T // self._block_tokens
            offsets_T = self.places_T - blocks_T * self._block_tokens
            heads_H1 = torch.arange(num_heads, device=blocks_T.device)[:, None]
            rows_HT = (blocks_T * num_heads + heads_H1) * self._block_tokens + offsets_T
            self._rows[num_heads] = rows_HT.reshape(-1)
        return self._rows[num_heads]


def context_of(blocks: Tensor, ids_SM: Tensor) -> Tensor:
    """Gather blocks [N, Hkv, P, D] by ids [S, M] into contexts [S, Hkv, M · P, D]."""
    num_samples, num_blocks = ids_SM.shape
    context = blocks.index_select(0, ids_SM.reshape(-1)).view(num_samples, num_blocks, *blocks.shape[1:])
    return context.transpose(1, 2).reshape(num_samples, blocks.shape[1], num_blocks * blocks.shape[2], blocks.shape[3])


def _enlarged(old: Tensor, num_blocks: int) -> Tensor:
    """With so many blocks at least: a layer may have had addresses for all of them when others found none."""
    if len(old) >= num_blocks:
        return old
    new = old.new_zeros(num_blocks, *old.shape[1:])
    new[: old.shape[0]] = old
    return new


_NO_RESERVE = 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0
"""Linux' MAP_NORESERVE, which `mmap` names from Python 3.13 on: addresses may be more than there is memory."""


def _addresses(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Zeros that take memory when they are written. None where the system has no such, or not as many addresses."""
    count = math.prod(shape)
    if count == 0 or not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NO_RESERVE if sys.platform == "linux" else 0)
    try:
        pages = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    except OSError:  # beyond `ulimit -v`, or the system promises no more than it has (vm.overcommit_memory = 2)
        return None
    return torch.frombuffer(pages, dtype=dtype).view(shape)

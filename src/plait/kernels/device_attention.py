"""Attention over blocks on a GPU, by Triton: rows of one token, drafts, trees and chunks of prompts in one launch.

Every key is read once by the query heads that share it. Where there are few samples, the keys of each are dealt out to
several programs (a second launch puts their parts together), so that all of the GPU reads.

Shapes: T new tokens, Hq query heads, Hkv key heads, D and E head sizes of keys and of values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from plait.kernels.on_devices import multiprocessors_of, power_of_two
from plait.kernels.paged_call import PagedCall

MOST_TREE_TOKENS = 63
"""What a row of a tree sees is a number's bits."""

TILE = 64
"""Pairs of a row and a head of a tile at most; 16 at least, which the matrix units take."""
KEYS = 64
"""Keys that a program takes at a time, as many as fit its registers."""
STAGES = 3
"""How many such blocks of keys and values are on their way at a time: one computes, the next ones are read."""
SHARED_BYTES = 99 << 10
"""Memory that the programs of a multiprocessor share, of every GPU since 2020: of those that do not say how much."""
FEW_PAIRS, FEW_WARPS, WARPS = 16, 2, 4
"""Warps of a program whose tile is that small, and of others. On an H100 256 samples of 500 tokens, 12 heads of 128 for
2 of keys, take 50 µs by two and 60 by four, where 39 are what reading takes; 64 samples 13.4 and 14.5."""
MOST_SPLITS = 32
KEYS_OF_SPLIT = 64
"""Fewer are not worth a program of their own, which reads so many at once. Attention of few samples takes what it waits
for memory, one block of keys behind another: on an H100 9.8 µs for 500 keys in two parts of 256 (reading takes 0.2)."""
WAVES = 2
"""Programs for each multiprocessor at most that keys are dealt out for. Rounded down to a power of two there are more
than half as many, so each has one. On an H100 64 samples of 500 tokens, 2 key heads (128 programs for 132
multiprocessors) take 13.4 µs in two parts and 14.3 in four: the parts are written, and read to be put together."""


def paged_attention(call: PagedCall) -> Tensor:
    """[T, Hq, E] in the dtype of the query, float32 or bfloat16; the softmax in float32.

    Raises:
        ValueError: a tree has more tokens than a row can say that it sees.
    """
    from plait.kernels import device_kernels  # imports triton

    query, key_pool, value_pool = call.query, call.key_pool, call.value_pool
    assert key_pool.is_contiguous(), "the blocks of a layer are contiguous"
    assert value_pool.is_contiguous(), "the blocks of a layer are contiguous"
    query = query if query.stride(2) == 1 else query.contiguous()
    num_tokens, num_heads, key_size = query.shape
    num_key_heads, block_tokens, value_size = value_pool.shape[1:]
    group, num_samples = num_heads // num_key_heads, len(call.tables_SM)
    most_rows, most_keys = call.most()
    tile = min(TILE, max(16, power_of_two(group * most_rows)))
    tile = max(tile, power_of_two(group))
    rows = tile // group
    tiles = -(-most_rows // rows)
    num_programs = most_tiles(num_samples, tiles, num_tokens, rows) * num_key_heads
    splits = splits_of(num_programs, most_keys, programs_for(query.device))
    out = query.new_empty(num_tokens, num_heads, value_size)
    seen, depths = (out, out) if call.ancestors is None else _trees(call.starts_S1, call.ancestors)
    parts, tops, sums = out, out, out
    if splits > 1:
        parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
        tops, sums = torch.empty(2, splits, num_tokens, num_heads, dtype=torch.float32, device=out.device)
    wide_key, wide_value = max(16, power_of_two(key_size)), max(16, power_of_two(value_size))
    keys, stages = keys_at_a_time(tile, wide_key, wide_value, query.element_size(), shared_bytes_of(query.device))
    has_sinks = call.sinks is not None
    sinks = call.sinks.detach().contiguous() if call.sinks is not None else out
    device_kernels.attend[(num_samples * tiles, num_key_heads, splits)](
        query, query.stride(0), query.stride(1), key_pool, value_pool, parts, tops, sums,
        call.tables_SM, call.tables_SM.stride(0), call.starts_S1, call.held_S, seen, depths, sinks,
        num_tokens, tiles, call.window or 0, float(call.scale), float(call.softcap or 1.0),
        GROUP=group, KEY_HEADS=num_key_heads, P=block_tokens, D=key_size, E=value_size, ROWS=rows, M=tile,
        N=keys, WIDE_D=wide_key, WIDE_E=wide_value, SPLITS=splits,
        WINDOW=call.window is not None, SOFTCAP=call.softcap is not None, SINKS=has_sinks,
        TREES=call.ancestors is not None, WIDE=device_kernels.INTERPRETED, num_stages=stages,
        num_warps=FEW_WARPS if tile <= FEW_PAIRS else WARPS,
    )  # fmt: skip
    if splits > 1:
        device_kernels.merge[(num_tokens, num_heads)](
            parts, tops, sums, out, sinks, num_tokens,
            HEADS=num_heads, E=value_size, WIDE_E=wide_value, SPLITS=splits, SINKS=has_sinks,
        )  # fmt: skip
    return out


def store(key_pool: Tensor, value_pool: Tensor, places_T: Tensor, key: Tensor, value: Tensor) -> None:
    """Write keys [Hkv, T, D] and values [Hkv, T, E] of new tokens into blocks, in one launch.

    Args:
        key_pool, value_pool: [N, Hkv, P, D] and [N, Hkv, P, E], contiguous, of the same dtype.
        places_T: int64, block · P + offset in it.
    """
    from plait.kernels import device_kernels  # imports triton

    num_key_heads, num_tokens, key_size = key.shape
    key = key if key.stride(2) == 1 else key.contiguous()
    value = value if value.stride(2) == 1 else value.contiguous()
    device_kernels.store[(num_tokens, num_key_heads)](
        key, key.stride(0), key.stride(1), value, value.stride(0), value.stride(1), key_pool, value_pool, places_T,
        KEY_HEADS=num_key_heads, P=key_pool.shape[2], D=key_size, E=value.shape[2],
        WIDE_D=power_of_two(key_size), WIDE_E=power_of_two(value.shape[2]), num_warps=1,
    )  # fmt: skip


def keys_at_a_time(tile: int, wide_key: int, wide_value: int, number_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """Keys that a program takes at a time, and how many times as many are on their way: so that they fit the memory of
    a multiprocessor, with the tile of queries and its scores. Where nothing fits, the least of both.

    Args:
        tile: pairs of a row and a head.
        wide_key, wide_value: sizes of a head, filled up to powers of two.
        number_bytes: of a number of these.
    """
    most = KEYS if max(wide_key, wide_value) <= 128 else KEYS // 2
    for keys, stages in ((most, STAGES), (most, 2), (32, 2), (16, 2), (16, 1)):
        held = number_bytes * (tile * wide_key + stages * keys * (wide_key + wide_value))
        if held + 4 * tile * keys <= shared_bytes:
            return keys, stages
    return 16, 1


def most_tiles(num_samples: int, tiles: int, num_tokens: int, rows: int) -> int:
    """Tiles that have rows, at most: of samples that have so many tokens together, each of them no more than so many
    tiles of so many rows take."""
    return min(num_samples * tiles, num_tokens // rows + num_samples)


def splits_of(num_programs: int, most_keys: int, wanted: int) -> int:
    """Into how many parts the keys of a sample are dealt: a power of two, so that few programs are compiled, and the
    same for all contexts between two powers of two.

    Args:
        num_programs: without parts.
        wanted: programs that fill the device. There are no more than so many by parts, and more than half as many where
            the keys are worth it.
    """
    room = max(1, wanted // max(1, num_programs))
    worth = power_of_two(most_keys) // KEYS_OF_SPLIT
    return max(1, min(1 << (room.bit_length() - 1), worth, MOST_SPLITS))


def programs_for(device: torch.device) -> int:
    """Programs that fill a device."""
    return WAVES * multiprocessors_of(device)


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Shared memory of a multiprocessor that one program may take, in bytes."""
    if device.type != "cuda":
        return 1 << 20
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BYTES)


def _trees(starts_S1: Tensor, ancestors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """What each new token sees of its sample's, as bits [T] int64, and its depth [T] int32."""
    bits, depths = [], []
    starts = starts_S1.tolist()
    for (start, stop), tree in zip(pairwise(starts), ancestors, strict=True):
        if stop - start > MOST_TREE_TOKENS and any(tree is not None for tree in ancestors):
            raise ValueError(
                f"{stop - start} new tokens of a sample beside a tree: expected {MOST_TREE_TOKENS} at most"
            )
        rows = torch.ones(stop - start, stop - start, dtype=torch.bool).tril() if tree is None else tree
        rows = rows.to(starts_S1.device)
        bits.append((rows.long() << torch.arange(stop - start, device=rows.device)).sum(1))
        depths.append(rows.sum(1) - 1)
    return torch.cat(bits), torch.cat(depths).int()

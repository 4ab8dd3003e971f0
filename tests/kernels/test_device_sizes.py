"""How much a program of the attention of GPUs takes at a time, by hand; no triton is needed."""

from __future__ import annotations

import pytest

from plait.kernels.device_attention import keys_at_a_time

H100, A100, RTX_4090 = 227 << 10, 163 << 10, 99 << 10


@pytest.mark.parametrize(
    ("tile", "wide_key", "wide_value", "number_bytes", "shared", "expected"),
    [
        # bfloat16, heads of 128: 16 KiB of queries, 32 KiB a stage, 16 KiB of scores
        (64, 128, 128, 2, H100, (64, 3)),
        (64, 128, 128, 2, A100, (64, 3)),
        (64, 128, 128, 2, RTX_4090, (64, 2)),
        # float32, heads of 128: 32 KiB, 64 KiB a stage, 16 KiB
        (64, 128, 128, 4, H100, (64, 2)),
        (64, 128, 128, 4, A100, (32, 2)),
        # bfloat16, heads of 256: 32 KiB, 32 KiB a stage, 8 KiB
        (64, 256, 256, 2, H100, (32, 3)),
        (64, 256, 256, 2, RTX_4090, (16, 2)),
        # float32, heads of 256: 64 KiB, 64 KiB a stage, 8 KiB
        (64, 256, 256, 4, H100, (32, 2)),
        # float32, heads of 512: 128 KiB, 32 KiB for a key of each of 16, 4 KiB: one stage of 64 KiB
        (64, 512, 512, 4, H100, (16, 1)),
        # one row of a small model
        (16, 64, 64, 2, RTX_4090, (64, 3)),
    ],
)
def test_keys_at_a_time_fit_the_memory_of_a_multiprocessor(
    tile: int, wide_key: int, wide_value: int, number_bytes: int, shared: int, expected: tuple[int, int]
) -> None:
    assert keys_at_a_time(tile, wide_key, wide_value, number_bytes, shared) == expected
    keys, stages = expected
    held = number_bytes * (tile * wide_key + stages * keys * (wide_key + wide_value)) + 4 * tile * keys
    assert held <= shared

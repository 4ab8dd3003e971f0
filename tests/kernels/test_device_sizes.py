"""How much a program of the attention of GPUs takes at a time, and how many there are, by hand; no triton is needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.kernels.device_attention import MOST_SPLITS, WAVES, keys_at_a_time, most_tiles, splits_of

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


def test_keys_are_dealt_out_where_that_is_worth_it() -> None:
    assert splits_of(1_000, 100_000, 264) == 1, "the device is full"
    assert splits_of(3, 60, 264) == 1, "one program reads them at once"
    assert splits_of(3, 200, 264) == 4
    assert splits_of(3, 1_000, 264) == 16
    assert splits_of(66, 4_096, 264) == 4
    assert splits_of(3, 5_000, 264) == splits_of(3, 8_000, 264) == 32


@pytest.mark.parametrize(
    ("samples", "short", "long"),
    [
        (1, 16, 32),  # 32 programs of 1,000 tokens, 64 of 8,000: no more parts than are compiled for
        (8, 16, 16),  # 256
        (16, 8, 8),
        (32, 4, 4),
        (64, 2, 2),  # 256; four would be 512
        (100, 1, 1),  # 200; two would be 400
        (256, 1, 1),
    ],
)
def test_keys_on_an_h100_by_the_number_of_samples(samples: int, short: int, long: int) -> None:
    """132 multiprocessors, two key heads."""
    wanted = 132 * WAVES
    assert splits_of(2 * samples, 1_000, wanted) == short
    assert splits_of(2 * samples, 8_000, wanted) == long


@pytest.mark.parametrize("multiprocessors", [108, 128, 132, 148])
def test_each_multiprocessor_has_a_program_where_keys_are_many(multiprocessors: int) -> None:
    """And no more than `WAVES`, but where there are as many without parts."""
    for programs in range(1, 2_000):
        splits = splits_of(programs, 1 << 20, WAVES * multiprocessors)
        assert programs * splits >= multiprocessors or splits == MOST_SPLITS
        assert programs * splits <= WAVES * multiprocessors or splits == 1


def test_tiles_of_samples_of_different_lengths_by_hand() -> None:
    """A chunk of 1,000 rows beside 15 of few: of 16 x 100 tiles of 10 rows no more than 103 + 16 have any."""
    assert most_tiles(16, 100, 1000 + 15 * 2, 10) == 103 + 16
    assert most_tiles(256, 1, 256, 10) == 256, "a row of each"
    assert most_tiles(1, 26, 256, 10) == 26, "one chunk"


@given(counts=st.lists(st.integers(0, 200), min_size=1, max_size=30), rows=st.integers(1, 64))
def test_no_more_tiles_have_rows(counts: list[int], rows: int) -> None:
    of_samples = [-(-count // rows) for count in counts]
    assert (
        sum(of_samples) <= most_tiles(len(counts), max(of_samples), sum(counts), rows) <= len(counts) * max(of_samples)
    )

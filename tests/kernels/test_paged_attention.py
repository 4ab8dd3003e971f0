"""The kernels against their plain twins, and what a row may depend on: nothing but itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.generation.paged import paged_attention_plain
from plait.kernels import paged_attention
from plait.kernels.paged_call import PagedCall

pytestmark = pytest.mark.skipif(not paged_attention.AVAILABLE, reason="numba is not installed")

DTYPES = [torch.float32, torch.bfloat16]
BY_UNIT = pytest.mark.parametrize("by_unit", [False, True], ids=["vectors", "matrix unit"])
"""Where the CPU has no matrix unit, both are by vectors."""
SIZES = [(9, 3, 64, 64), (4, 2, 8, 8), (8, 1, 128, 128), (4, 4, 32, 96), (6, 2, 20, 12), (2, 2, 96, 64)]
"""Hq, Hkv, D, E: sizes that the vector instructions take, and others."""


@contextlib.contextmanager
def attention(by_unit: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not by_unit:
            patch.setattr(paged_attention, "by_matrix_unit", lambda dtype: False)
        yield


def random_tree(count: int, generator: torch.Generator) -> torch.Tensor:
    tree = torch.eye(count, dtype=torch.bool)
    for node in range(1, count):
        tree[node] |= tree[int(torch.randint(node, (), generator=generator))]
    return tree


def work(
    dtype: torch.dtype, sizes: tuple[int, ...], held: list[int], counts: list[int], seed: int
) -> tuple[torch.Tensor, ...]:
    """query, key pool, value pool, tables, starts, held of samples whose blocks lie anywhere in the pool."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_key_heads, key_size, value_size = sizes
    width = max(-(-(have + new) // paged_attention.KEYS) for have, new in zip(held, counts, strict=True))
    num_blocks = width * len(held) + 2
    tables = torch.randperm(num_blocks, generator=generator)[: width * len(held)].view(len(held), width).int()
    for row, (have, new) in enumerate(zip(held, counts, strict=True)):
        tables[row, -(-(have + new) // paged_attention.KEYS) :] = -1

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    starts = torch.tensor([0, *counts]).cumsum(0).int()
    key_pool = random(num_blocks, num_key_heads, paged_attention.KEYS, key_size)
    value_pool = random(num_blocks, num_key_heads, paged_attention.KEYS, value_size)
    query = random(sum(counts), num_heads, key_size)
    return query, key_pool, value_pool, tables, starts, torch.tensor(held).int()


@BY_UNIT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.sampled_from(SIZES),
    samples=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 9) | st.integers(10, 40)), min_size=1, max_size=4),
    window=st.sampled_from([None, None, 1, 3, 17, 50]),
    trees=st.booleans(),
    softcap=st.sampled_from([None, None, 2.0, 20.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_paged_attention_is_the_plain_one(
    dtype: torch.dtype,
    by_unit: bool,
    sizes: tuple[int, ...],
    samples: list[tuple[int, int]],
    window: int | None,
    trees: bool,
    softcap: float | None,
    has_sinks: bool,
    seed: int,
) -> None:
    held, counts = map(list, zip(*samples, strict=True))
    tensors = work(dtype, sizes, held, counts, seed)
    generator = torch.Generator().manual_seed(seed)
    ancestors = None
    if trees:
        ancestors = [None if index == 1 else random_tree(count, generator) for index, count in enumerate(counts)]
    sinks = torch.randn(sizes[0], generator=generator).to(dtype) * 3 if has_sinks else None
    options = {"ancestors": ancestors, "scale": sizes[2] ** -0.5, "window": window, "softcap": softcap, "sinks": sinks}
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    exact = paged_attention_plain(PagedCall(*wide, **options))
    with attention(by_unit):
        found = paged_attention.paged_attention(PagedCall(*tensors, **options))
    assert found.dtype == dtype
    bound = 5e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound)


@BY_UNIT
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_row_is_the_same_to_the_bit_alone_in_a_batch_and_in_a_chunk(
    dtype: torch.dtype, sizes: tuple[int, ...], by_unit: bool
) -> None:
    query, key_pool, value_pool, tables, starts, held = work(dtype, sizes, [20, 3, 40], [4, 1, 22], 0)
    with attention(by_unit):
        check_rows(query, key_pool, value_pool, tables, starts, held)


def check_rows(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    held: torch.Tensor,
) -> None:
    for window in (None, 5):
        options = {"scale": 0.3, "window": window}
        whole = paged_attention.paged_attention(PagedCall(query, key_pool, value_pool, tables, starts, held, **options))
        for sample in range(3):
            for row in range(int(starts[sample]), int(starts[sample + 1])):
                one = PagedCall(
                    query[row : row + 1],
                    key_pool,
                    value_pool,
                    tables[sample : sample + 1],
                    torch.tensor([0, 1]).int(),
                    held[sample : sample + 1] + (row - int(starts[sample])),
                    **options,
                )
                alone = paged_attention.paged_attention(one)
                assert torch.equal(alone[0], whole[row])


def test_a_transposed_query_and_what_lies_behind_the_context() -> None:
    query, key_pool, value_pool, tables, starts, held = work(torch.bfloat16, (4, 2, 64, 64), [20], [3], 0)
    expected = paged_attention.paged_attention(PagedCall(query, key_pool, value_pool, tables, starts, held, scale=0.1))
    key_pool[tables[0, 1], :, 7:] = 1000.0  # place 23 and on
    value_pool[tables[0, 1], :, 7:] = 1000.0
    heads_first = query.transpose(0, 1).contiguous().transpose(0, 1)
    found = paged_attention.paged_attention(
        PagedCall(heads_first, key_pool, value_pool, tables, starts, held, scale=0.1)
    )
    assert torch.equal(found, expected)


def test_a_broken_number_shows() -> None:
    for broken in (torch.nan, torch.inf):
        query, key_pool, value_pool, tables, starts, held = work(torch.bfloat16, (4, 2, 64, 64), [20], [1], 0)
        query[0, 1, 3] = broken
        out = paged_attention.paged_attention(PagedCall(query, key_pool, value_pool, tables, starts, held, scale=0.1))
        assert not out[0, 1].isfinite().any()
        assert out[0, [0, 2, 3]].isfinite().all()

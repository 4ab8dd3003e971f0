"""The ragged step against attention said plainly, one token at a time, in float64: blocks, chains, trees, windows."""

from __future__ import annotations

import math
import random
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.generation import pool as pool_module
from plait.generation.paged import attention_for, paged_attention_plain
from plait.generation.pool import KVPool, Places
from plait.generation.ragged import NewTokens, ragged
from plait.generation.ragged_context import RaggedContext
from plait.kernels import paged_attention
from plait.kernels.paged_call import PagedCall
from plait.models.compute.attention_form import AttentionForm
from plait.runtime.process import resident_bytes
from tests.cases import examples

HEADS, KEY_HEADS, D, E, P = 4, 2, 8, 6, 4


def attend_alone(query: Tensor, key: Tensor, value: Tensor, positions: list[int], at: int, **options) -> Tensor:
    """One row [Hq, D] at position `at` over the keys [Hkv, K, D] that it sees, which stand at `positions`."""
    out = []
    shared = len(query) // len(key)
    hidden = [options["window"] is not None and at - position >= options["window"] for position in positions]
    for head in range(len(query)):
        scores = key[head // shared].double() @ query[head].double() * options["scale"]
        if options["softcap"] is not None:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        scores[torch.tensor(hidden)] = -math.inf
        if options["sinks"] is not None:
            scores = torch.cat([scores, options["sinks"][head : head + 1].double()])
        probs = scores.softmax(0)[: len(positions)]
        out.append(probs @ value[head // shared].double())
    return torch.stack(out)


def random_tree(count: int, rng: random.Random) -> Tensor:
    seen = torch.eye(count, dtype=torch.bool)
    for child in range(1, count):
        seen[child] |= seen[rng.randrange(child)]
    return seen


@settings(max_examples=examples(24, 60), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    window=st.sampled_from([None, 3, 9]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    block_tokens=st.sampled_from([4, 16]),
)
def test_every_row_sees_what_it_may(seed, window, softcap, with_sinks, dtype, block_tokens) -> None:
    """Samples of any size over scattered blocks: decode rows, chains, trees, chunks with and without a context."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    sizes = [(rng.choice([1, 1, 1, 2, 5, 16, 17, 40]), rng.choice([0, 1, 7, 8, 30])) for _ in range(rng.randint(1, 5))]
    free = list(range(100))
    rng.shuffle(free)
    samples = []
    for count, held in sizes:
        table = [free.pop() for _ in range(-(-(held + count) // block_tokens))]
        tree = random_tree(count, rng) if count <= 16 and rng.random() < 0.4 else None
        samples.append(NewTokens([0] * count, held, table, tree))
    samples.sort(key=lambda sample: sample.rank)
    sinks = normal(HEADS) if with_sinks else None
    pool = KVPool(block_tokens)
    pool.reserve(100, 100)
    truth = []
    for sample in samples:  # the contexts, written ahead as longer chunks
        key, value = normal(KEY_HEADS, sample.held, D), normal(KEY_HEADS, sample.held, E)
        if sample.held:
            ahead = ragged([NewTokens([0] * sample.held, 0, sample.table)], block_tokens)
            pool.write(3, Places(ahead.places_T, block_tokens), key, value)
        truth.append((key, value))
    batch = ragged(samples, block_tokens)
    query, key, value = (
        normal(heads, batch.num_tokens, size) for heads, size in ((HEADS, D), (KEY_HEADS, D), (KEY_HEADS, E))
    )
    options = {"scale": 0.4, "window": window, "softcap": softcap, "sinks": sinks}
    attention, takes_chunks = attention_for(query.device, dtype, block_tokens), rng.random() < 0.4
    context = RaggedContext(pool, batch, attention, takes_chunks=takes_chunks)
    out = context.attend(3, query, key, value, AttentionForm(**options))
    assert out.shape == (batch.num_tokens, HEADS, E)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    row = 0
    for sample, (held_key, held_value) in zip(samples, truth, strict=True):
        count, first = len(sample.token_ids), row
        for i in range(count):
            seen = list(range(i + 1)) if sample.ancestors is None else sample.ancestors[i].nonzero()[:, 0].tolist()
            positions = [*range(sample.held), *(sample.held + depth for depth in range(len(seen)))]
            keys = torch.cat([held_key, key[:, [first + j for j in seen]]], dim=1)
            values = torch.cat([held_value, value[:, [first + j for j in seen]]], dim=1)
            at = positions[-1]
            assert int(batch.position_ids_T[row]) == at
            expected = attend_alone(query[:, row], keys, values, positions, at, **options)
            torch.testing.assert_close(out[row].double(), expected, atol=tolerance, rtol=tolerance)
            row += 1


def test_chunks_are_a_call_of_their_own_beside_rows() -> None:
    """A call has programs for each sample, as many as its longest one needs: with 200 rows beside a prompt of 4,096
    tokens most would have nothing to do. Trees are of the rows alone."""
    calls: list[PagedCall] = []

    def attention(call: PagedCall) -> Tensor:
        calls.append(call)
        return torch.full((len(call.query), HEADS, E), float(len(calls)))

    tree = torch.ones(2, 2, dtype=torch.bool).tril()
    rows = [NewTokens([0, 0], 5, [0, 1], tree), *(NewTokens([0], 3 + i, [2 + i, 9]) for i in range(3))]
    chunks = [NewTokens([0] * 70, 0, list(range(10, 28))), NewTokens([0] * 20, 8, list(range(30, 37)))]
    batch, pool = ragged([*rows, *chunks], P), KVPool(P)
    pool.reserve(100, 100)
    given = (torch.zeros(heads, batch.num_tokens, size) for heads, size in ((HEADS, D), (KEY_HEADS, D), (KEY_HEADS, E)))
    out = RaggedContext(pool, batch, attention, takes_chunks=True).attend(0, *given, AttentionForm(1.0))
    assert [call.lengths for call in calls] == [(2, 7), (70, 70)]
    assert [call.starts_S1.tolist() for call in calls] == [[0, 2, 3, 4, 5], [0, 70, 90]]
    assert [call.held_S.tolist() for call in calls] == [[5, 3, 4, 5], [0, 8]]
    assert [len(call.tables_SM) for call in calls] == [4, 2]
    assert [call.ancestors is None for call in calls] == [False, True]
    assert out[:, 0, 0].tolist() == [1.0] * 5 + [2.0] * 90


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_samples", [3, 40])
def test_one_row_each_without_the_kernel(dtype: torch.dtype, num_samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of torch's own products, for few keys and for many, against the plain twin."""

    monkeypatch.setattr(paged_attention, "AVAILABLE", False)
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(200, 3, 16, size, generator=generator).to(dtype) for size in (32, 32))
    query = torch.randn(num_samples, 9, 32, generator=generator).to(dtype)
    tables = torch.randperm(200, generator=generator)[: num_samples * 4].view(num_samples, 4).int()
    held = torch.randint(0, 64, (num_samples,), generator=generator).int()
    starts = torch.arange(num_samples + 1).int()
    for window in (None, 20):
        call = PagedCall(query, key, value, tables, starts, held, scale=0.2, window=window)
        out, plain = attention_for(query.device, dtype, 16)(call), paged_attention_plain(call)
        torch.testing.assert_close(out, plain, atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])
def test_a_pool_grows_reads_and_copies(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_place:
        monkeypatch.setattr(pool_module, "_addresses", lambda shape, dtype: None)
    pool = KVPool(P)
    pool.reserve(3, 10)
    key, value = torch.randn(2, 9, D), torch.randn(2, 9, E)
    table = [2, 0, 1]
    batch = ragged([NewTokens([5] * 9, 0, table)], P)
    for layer in range(2):
        pool.write(layer, Places(batch.places_T, P), key, value)
    assert pool.num_bytes == 2 * 3 * 2 * P * (D + E) * 4
    pool.reserve(4, 10)
    assert pool.num_blocks == 4
    pool.reserve(5, 10)
    assert pool.num_blocks == (5 if in_place else 6), "copies make room for more than is asked"
    pool.reserve(6, 10)
    assert pool.num_bytes == 2 * 6 * 2 * P * (D + E) * 4
    pool.copy([(0, 5), (2, 4)])
    for start, stop in ((0, 9), (3, 8), (5, 6)):
        for at in (table, [4, 5, 1]):
            kv = pool.read(1, Places.of(at, start, stop, P, key.device))
            assert torch.equal(kv.key, key[:, start:stop])
            assert torch.equal(kv.value, value[:, start:stop])
    with pytest.raises(AssertionError, match="11 blocks needed, 10"):
        pool.reserve(11, 10)
    pool.clear()
    assert (pool.num_bytes, pool.num_blocks) == (0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and addresses beyond the memory are Linux'")
def test_a_pool_takes_memory_as_blocks_are_written() -> None:
    """4 TiB of addresses, of which 64 MiB are written: no copy when it grows, and all of it back at the end."""
    pool = KVPool(P)
    num_tokens, block_bytes = 64, P * 256 * 2 * 4
    key = torch.ones(1, num_tokens, 256)
    half = (32 << 20) // block_bytes
    before = resident_bytes()
    pool.reserve(half, 1 << 29)
    address = pool.layer(0, key, key).key.data_ptr()
    assert resident_bytes() - before < 1 << 20
    for num_blocks in (half, 2 * half):
        pool.reserve(num_blocks, 1 << 29)
        kv = pool.layers[0]
        kv.key[:num_blocks] = 1
        kv.value[:num_blocks] = 1
        assert abs(resident_bytes() - before - num_blocks * block_bytes) < 4 << 20
    assert kv.key.data_ptr() == address
    assert pool.num_bytes == 64 << 20
    del kv
    pool.clear()
    assert resident_bytes() - before < 4 << 20

"""The Triton kernel against the plain twin: on a GPU where there is one, else by Triton's interpreter on a CPU. Without
triton these are skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.generation.paged import paged_attention_plain
from plait.kernels.paged_call import PagedCall
from tests import warm
from tests.cases import examples
from tests.kernels.test_paged_attention import SIZES, random_tree, work

pytest.importorskip("triton", reason="triton is not installed: the attention of GPUs is not tested")

pytestmark = [pytest.mark.cuda] if warm.HAS_GPU else []


@pytest.fixture(scope="module")
def device() -> ModuleType:
    """The module. Its kernels are interpreted where there is no GPU (`tests/conftest.py`)."""
    from plait.kernels import device_attention

    return device_attention


def there(call: PagedCall) -> PagedCall:
    """The same where the kernel computes it."""
    from plait.kernels import device_kernels

    where = "cpu" if device_kernels.INTERPRETED else "cuda"
    given = {field.name: getattr(call, field.name) for field in fields(call)}
    return replace(call, **{name: it.to(where) for name, it in given.items() if isinstance(it, torch.Tensor)})


def allowed(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 2e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


def near(call: PagedCall, attention: Callable[[PagedCall], Tensor]) -> None:
    torch.testing.assert_close(attention(there(call)).cpu(), paged_attention_plain(call), **allowed(call.query.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 9}, {"softcap": 2.0}, {"window": 33, "softcap": 1.0}], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_it_computes_what_the_plain_twin_says(
    device: ModuleType, dtype: torch.dtype, sizes: tuple[int, ...], options: dict[str, Any], sinks: bool
) -> None:
    given = work(dtype, sizes, [0, 5, 40, 16, 150], [1, 3, 1, 20, 2], seed=1)
    generator = torch.Generator().manual_seed(2)
    extra = {"sinks": torch.randn(sizes[0], generator=generator)} if sinks else {}
    near(PagedCall(*given, scale=0.3, **options, **extra), device.paged_attention)


@pytest.mark.parametrize("window", [None, 4, 70])
@pytest.mark.parametrize("splits", [1, 4])
def test_trees_see_their_ancestors_alone(
    device: ModuleType, monkeypatch: pytest.MonkeyPatch, window: int | None, splits: int
) -> None:
    monkeypatch.setattr(device, "splits_of", lambda *numbers: splits)
    generator = torch.Generator().manual_seed(5)
    counts = [7, 1, 16, 3]
    given = work(torch.float32, (4, 2, 16, 16), [0, 20, 100, 33], counts, seed=3)
    ancestors = (random_tree(7, generator), None, random_tree(16, generator), None)
    near(PagedCall(*given, ancestors, scale=0.4, window=window), device.paged_attention)


@pytest.mark.parametrize("splits", [2, 8])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_keys_that_are_dealt_out_come_together(
    device: ModuleType, monkeypatch: pytest.MonkeyPatch, splits: int, sinks: bool
) -> None:
    """Also where a part has no keys, or none that its window lets see."""
    monkeypatch.setattr(device, "splits_of", lambda *numbers: splits)
    for window in (None, 100):
        given = work(torch.float32, (6, 2, 20, 12), [0, 300, 63], [1, 1, 40], seed=4)
        extra = {"sinks": torch.linspace(-1, 1, 6)} if sinks else {}
        near(PagedCall(*given, scale=0.3, window=window, **extra), device.paged_attention)


@settings(max_examples=examples(10, 60))
@given(data=st.data())
def test_any_mix_of_samples(device: ModuleType, data: st.DataObject) -> None:
    groups, key_heads = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    sizes = (groups * key_heads, key_heads, data.draw(st.integers(3, 40)), data.draw(st.integers(3, 40)))
    counts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    held = [data.draw(st.integers(0, 90)) for _ in counts]
    window = data.draw(st.none() | st.integers(1, 60))
    near(PagedCall(*work(torch.float32, sizes, held, counts, seed=6), scale=0.3, window=window), device.paged_attention)


def test_a_sample_is_the_same_in_any_company(device: ModuleType) -> None:
    """To the bit, where keys are not dealt out."""
    query, keys, values, tables, starts, held = work(torch.float32, (4, 2, 16, 16), [30, 7, 81], [1, 5, 1], seed=7)
    together = device.paged_attention(there(PagedCall(query, keys, values, tables, starts, held, scale=0.3)))
    for sample in range(3):
        rows = slice(int(starts[sample]), int(starts[sample + 1]))
        one = PagedCall(
            query[rows], keys, values, tables[sample : sample + 1], starts[sample : sample + 2] - starts[sample],
            held[sample : sample + 1], scale=0.3,
        )  # fmt: skip
        torch.testing.assert_close(device.paged_attention(there(one)), together[rows], atol=1e-6, rtol=0)


def test_rows_beside_samples_without_any(device: ModuleType) -> None:
    """As steps that are replayed have them: lengths of the widest sample that may come, samples without rows."""
    query, keys, values, tables, starts, held = work(torch.float32, (4, 2, 16, 16), [30, 7, 81], [1, 5, 2], seed=7)
    none = (0, 0)
    filled = PagedCall(
        query, keys, values, torch.cat([tables, tables[:2]]), torch.cat([starts, starts[-1:].expand(2)]),
        torch.cat([held, held.new_tensor(none)]), scale=0.3, lengths=(16, 512),
    )  # fmt: skip
    expected = paged_attention_plain(PagedCall(query, keys, values, tables, starts, held, scale=0.3))
    torch.testing.assert_close(device.paged_attention(there(filled)).cpu(), expected, **allowed(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 64, 64), (3, 20, 12), (2, 128, 96)], ids=str)
def test_new_keys_are_stored_at_their_places(
    device: ModuleType, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """Whatever the strides of keys and values are: heads or tokens first, parts of a product of all."""
    from plait.kernels import device_kernels

    where = "cpu" if device_kernels.INTERPRETED else "cuda"
    heads, key_size, value_size = sizes
    generator = torch.Generator().manual_seed(0)
    places_T = torch.randperm(6 * 16, generator=generator)[:9]
    pools = [torch.randn(6, heads, 16, size, generator=generator).to(dtype) for size in (key_size, value_size)]
    product = torch.randn(9, heads * (key_size + value_size), generator=generator).to(dtype)
    keys_first = product[:, : heads * key_size].unflatten(1, (heads, key_size)).transpose(0, 1).contiguous()
    values = product[:, heads * key_size :].unflatten(1, (heads, value_size)).transpose(0, 1)
    stored = [pool.clone().to(where) for pool in pools]
    device.store(*stored, places_T.to(where), keys_first.to(where), values.to(where))
    for pool, new in zip(pools, (keys_first, values), strict=True):
        pool[places_T // 16, :, places_T % 16] = new.transpose(0, 1)
    for got, want in zip(stored, pools, strict=True):
        assert got.cpu().equal(want)


def vast(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory with more numbers than an int32 counts: on a CPU addresses alone, until they are written."""
    from plait.kernels import device_kernels

    try:
        return torch.empty(shape, dtype=dtype, device="cpu" if device_kernels.INTERPRETED else "cuda")
    except RuntimeError:
        pytest.skip("there is no room for it")


def test_blocks_may_lie_behind_two_thousand_million_numbers(device: ModuleType) -> None:
    """As the pool of one layer may have, of a model of few layers on a large GPU: stored and read where they belong."""
    query, keys, values, tables, starts, held = work(torch.bfloat16, (4, 2, 64, 64), [70, 33], [1, 1], seed=9)
    num_blocks = (1 << 31) // keys[0].numel() + len(keys)
    pools = [vast((num_blocks, *keys.shape[1:]), torch.bfloat16) for _ in range(2)]
    far = num_blocks - len(keys)
    assert (num_blocks - 1) * keys[0].numel() >= 1 << 31
    where, places_T = pools[0].device, far * 16 + torch.arange(len(keys) * 16)
    rows = [pool.transpose(1, 2).flatten(0, 1).transpose(0, 1).to(where) for pool in (keys, values)]
    device.store(*pools, places_T.to(where), *rows)
    for pool, written in zip(pools, (keys, values), strict=True):
        assert pool[far:].cpu().equal(written)
    near_by = PagedCall(query, keys, values, tables, starts, held, scale=0.3)
    found = device.paged_attention(
        PagedCall(query.to(where), *pools, (tables + far).to(where), starts.to(where), held.to(where), scale=0.3)
    )
    assert found.equal(device.paged_attention(there(near_by)))


def test_heads_of_a_query_may_lie_far_apart(device: ModuleType) -> None:
    """As those of a very long chunk, whose heads come first."""
    query, keys, values, tables, starts, held = work(torch.bfloat16, (4, 2, 64, 64), [70, 33], [1, 1], seed=9)
    apart = (1 << 30) + 64
    memory = vast((4 * apart,), torch.bfloat16)
    spread = memory.as_strided(query.shape, (64, apart, 1))
    spread.copy_(query)
    call = PagedCall(query, keys, values, tables, starts, held, scale=0.3)
    assert device.paged_attention(replace(there(call), query=spread)).equal(device.paged_attention(there(call)))

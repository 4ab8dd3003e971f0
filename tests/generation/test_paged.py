"""Attention where the kernel is not taken: how much it computes, and that dealing it out changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.generation import paged
from plait.generation.paged import attention_for, paged_attention_plain
from plait.kernels.paged_call import PagedCall

BLOCK = 16
attention = attention_for(torch.device("cpu"), torch.float64, BLOCK)


def case(counts: list[int], held: list[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """query, key pool, value pool, tables, starts, held of samples with blocks of their own."""
    generator = torch.Generator().manual_seed(0)
    sizes = [-(-(have + new) // BLOCK) for have, new in zip(held, counts, strict=True)]
    tables, at = torch.full((len(counts), max(sizes)), -1, dtype=torch.int32), 0
    for sample, size in enumerate(sizes):
        tables[sample, :size] = torch.arange(at, at + size)
        at += size
    pools = [torch.randn(at, 2, BLOCK, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
    query = torch.randn(sum(counts), 4, 8, generator=generator, dtype=torch.float64).to(dtype)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return query, *pools, tables, starts, torch.tensor(held, dtype=torch.int32)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 0.0, 2.0])])
def test_samples_of_one_token_beside_longer_ones_and_a_tree(
    softcap: float | None, window: int | None, sinks: Tensor | None
) -> None:
    given = case([1, 5, 1, 3, 1], [20, 7, 0, 30, 33], torch.float64)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    options: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": softcap, "sinks": sinks}
    options["ancestors"] = (None, None, None, tree, None)
    call = PagedCall(*given, **options)
    torch.testing.assert_close(attention(call), paged_attention_plain(call), atol=1e-12, rtol=0)


def test_a_chunk_does_not_multiply_the_rows_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are computed, whether a sample has so many or not."""
    plain, computed = paged.paged_attention_plain, []

    def counting(call: PagedCall) -> Tensor:
        computed.append(len(call.tables_SM) * int((call.starts_S1[1:] - call.starts_S1[:-1]).max()))
        return plain(call)

    monkeypatch.setattr(paged, "paged_attention_plain", counting)
    attention(PagedCall(*case([1] * 64 + [16], [20] * 65, torch.float64), scale=0.3, softcap=2.0))
    assert computed == [64, 16]
    computed.clear()
    attention(PagedCall(*case([1] * 64, [20] * 64, torch.float64), scale=0.3, softcap=2.0))
    assert computed == [64]

"""Decode attention: its ways of computing against a float64 oracle."""

from __future__ import annotations

import pytest
import torch

from plait.generation import attention
from plait.generation.attention import decode_attention


@pytest.mark.parametrize("shape", [(1, 1, 1, 32, 8, 8), (3, 2, 3, 64, 16, 16), (5, 4, 1, 96, 8, 6)])
@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_way_is_the_softmax_over_the_places_seen(
    dtype: torch.dtype, products: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots longer than what is looked at, rows of ragged contexts, heads of a group side by side."""
    monkeypatch.setattr(attention, "PRODUCTS_FROM", 0 if products else 1 << 60)
    num_rows, num_heads, num_shared, num_keys, head_size, value_size = shape
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    query = random(num_heads, num_shared, num_rows, head_size).permute(2, 0, 1, 3)
    key = random(num_rows + 1, num_heads, num_keys + 7, head_size)[:num_rows, :, :num_keys]
    value = random(num_rows + 1, num_heads, num_keys + 7, value_size)[:num_rows, :, :num_keys]
    lengths = [num_keys - 3 * row for row in range(num_rows)]
    bias = torch.zeros(num_rows, 1, 1, num_keys, dtype=torch.promote_types(dtype, torch.float32))
    for row, length in enumerate(lengths):
        bias[row, ..., length:] = -torch.inf

    out = decode_attention(query, key, value, bias=bias, scale=0.3, softcap=None, sinks=None)
    assert out.dtype == dtype
    assert out.shape == (num_rows, num_heads, num_shared, value_size)
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for row, length in enumerate(lengths):
        scores = query[row].double() @ key[row, :, :length].double().transpose(1, 2) * 0.3
        expected = scores.softmax(-1) @ value[row, :, :length].double()
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=tolerance)

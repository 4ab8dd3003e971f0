"""Kernels of generation on a CPU; none is there yet, and every caller has its plain way."""

from __future__ import annotations

from typing import Any

from torch import Tensor

AVAILABLE = False


def paged_attention(query: Tensor, key_pool: Tensor, value_pool: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """See `generation.paged.paged_attention_plain`."""
    raise AssertionError("paged_attention is called where AVAILABLE says so")

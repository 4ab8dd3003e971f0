"""The prediction of generation's memory, by hand; benchmarks/generation.py holds it against what is found."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.cost.smollm2 import SHAPE as SMOLLM2


@pytest.fixture
def memory(imported: Callable[[str], ModuleType]) -> Any:
    return imported("generation.memory")


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_each_line(memory: Any, dtype: str, width: int) -> None:
    rows = memory.generation_rows(SMOLLM2, dtype, kv_tokens=1000, prefill_tokens=256, running=8, packed=True)
    linears = 30 * (576 * 1536 + 3 * 576 * 1536)
    assert [size for _, size in rows] == [
        memory.LOADED_BYTES,
        memory.KERNEL_BYTES,
        1000 * 2 * 30 * 192 * width,
        (linears + 576 * 49152) * width,
        256 * (576 * (3 * width + 8) + 3 * 1536 * width),
        8 * 49152 * 2 * width + 49152 * 28,
    ]
    assert rows[2][0] == "KV cache (1000 tokens)"
    plain = memory.generation_rows(SMOLLM2, dtype, kv_tokens=1000, prefill_tokens=256, running=8, packed=False)
    assert plain == rows[:3] + rows[4:], "without the packed copy"


@pytest.mark.parametrize(
    ("dtype", "kv_tokens", "running", "found_MB"),
    [("bfloat16", 1152, 8, 736), ("bfloat16", 4608, 32, 823), ("bfloat16", 2600, 64, 783), ("float32", 1152, 8, 1280)],
)
def test_what_was_found(memory: Any, dtype: str, kv_tokens: int, running: int, found_MB: float) -> None:
    """Peaks above the imports of a process that generates with SmolLM2-135M, kernels from disk."""
    weights = SMOLLM2.parameters * (2 if dtype == "bfloat16" else 4)
    rows = memory.generation_rows(SMOLLM2, dtype, kv_tokens=kv_tokens, prefill_tokens=256, running=running, packed=True)
    predicted = (weights + sum(size for _, size in rows)) / 1e6
    assert predicted == pytest.approx(found_MB, rel=0.05)

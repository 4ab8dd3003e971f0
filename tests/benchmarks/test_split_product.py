"""The product of few rows that `gpu.py` holds against cuBLAS: what it says, by Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from tests import warm

pytest.importorskip("triton", reason="triton is not installed")

DEVICE = "cuda" if warm.HAS_GPU else "cpu"


@pytest.fixture
def split(imported: Callable[[str], ModuleType]) -> ModuleType:
    imported("gpu")
    return importlib.import_module("on_device.split_product")


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 700), (8, 64, 256), (70, 130, 520)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_the_product(split: ModuleType, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """In one part and in several, with edges that no tile ends at; twice, as it leaves nothing behind."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    expected = torch.nn.functional.linear(x.float(), weight.float())
    for way in split.ways(rows):
        for _ in range(2):
            found = way(x, weight)
            assert found.dtype == dtype
            assert (found.float() - expected).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()


def test_inputs_are_dealt_out_where_tiles_are_few(split: ModuleType) -> None:
    assert split.splits_of(32, 12, 264) == 6, "two steps each at least"
    assert split.splits_of(32, 70, 264) == 8
    assert split.splits_of(48, 70, 264) == 4
    assert split.splits_of(280, 12, 264) == 1, "the device is full"
    assert split.splits_of(1, 1000, 264) == split.MOST_SPLITS
    assert split.splits_of(5, 1, 264) == 1

"""What names float32 leaves a float64 tensor as it is, and is done to all others."""

from __future__ import annotations

import torch

from plait.models.compute.float64 import kept_float64

WIDE = torch.ones(4, dtype=torch.float64)


def test_float64_is_kept_however_float32_is_named() -> None:
    with kept_float64(torch.float64):
        kept = [
            WIDE.float(),
            WIDE.float(memory_format=torch.preserve_format),
            WIDE.to(torch.float32),
            WIDE.to(dtype=torch.float32),
            torch.softmax(WIDE, 0, torch.float32),
            torch.softmax(WIDE, 0, dtype=torch.float32),
        ]
    assert {one.dtype for one in kept} == {torch.float64}
    assert kept[0] is WIDE
    assert WIDE.float().dtype is torch.float32, "behind it all is as ever"


def test_what_is_not_float64_becomes_float32_where_it_is_asked_for() -> None:
    with kept_float64(torch.float64):
        made = [
            WIDE.int().float(),
            WIDE.bfloat16().to(torch.float32),
            torch.zeros(3, dtype=torch.float32),
            torch.zeros(size=(3,), dtype=torch.float32),
        ]
    assert {one.dtype for one in made} == {torch.float32}


def test_models_of_other_dtypes_are_let_be() -> None:
    with kept_float64(torch.bfloat16):
        assert WIDE.float().dtype is torch.float32

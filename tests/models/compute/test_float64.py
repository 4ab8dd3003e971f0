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


def test_positions_are_multiplied_with_float64_by_either_product() -> None:
    """As rotary embeddings do it, by a product of matrices (Transformers 5.17) or of numbers: positions 0, 1 and 6
    times the frequencies 1 and 1/4. The positions are float32."""
    frequencies_F, positions_T = torch.tensor([1.0, 0.25], dtype=torch.float64), torch.tensor([0, 1, 6])
    with kept_float64(torch.float64):
        wide_F1, positions_1T = frequencies_F[:, None].to(dtype=torch.float), positions_T[None, :].float()
        angles = [
            wide_F1 @ positions_1T,
            wide_F1.matmul(positions_1T),
            (positions_1T.t() @ wide_F1.t()).t(),
            torch.matmul(wide_F1, positions_1T),
            wide_F1 * positions_1T,
        ]
        narrow = positions_1T.t() @ positions_1T
    for angles_FT in angles:
        assert angles_FT.dtype is torch.float64
        assert angles_FT.tolist() == [[0, 1, 6], [0, 0.25, 1.5]]
    assert narrow.dtype is torch.float32


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

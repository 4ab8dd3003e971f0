"""Which GPU a driver's name is of."""

from __future__ import annotations

import pytest

from plait.cost.hardware import GIB, known_device


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, "A100-80G"),
        ("NVIDIA A100-PCIE-40GB", 39, "A100-40G"),
        ("NVIDIA A800-SXM4-80GB", 80, "A800"),
        ("NVIDIA H100 80GB HBM3", 79, "H100"),
        ("NVIDIA H200", 139, "H200"),
        ("NVIDIA H20", 95, "H20"),
        ("NVIDIA L40S", 44, "L40S"),
        ("NVIDIA GeForce RTX 4090", 24, "RTX-4090"),
        ("NVIDIA GeForce RTX 3060", 12, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
        ("NVIDIA RTX 6000 Ada Generation", 48, None),
        ("NVIDIA GH200 480GB", 96, None),
        ("NVIDIA L40", 45, None),
    ],
)
def test_a_drivers_name_is_matched_whole(name: str, gib: int, known: str | None) -> None:
    found = known_device(name, gib * GIB)
    assert (None if found is None else found.name) == known

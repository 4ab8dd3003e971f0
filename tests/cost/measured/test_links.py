"""What two processes measure of each other, without another process."""

from __future__ import annotations

import pytest
import torch

from plait.cost.measured.links import TURNS, Pair
from plait.models.compute import widened


@pytest.mark.parametrize("widens", [True, False])
def test_processes_that_share_a_machine_compute_as_runs_do(monkeypatch: pytest.MonkeyPatch, widens: bool) -> None:
    """By widened numbers where there are no instructions for bfloat16: torch's products take ten times as long there,
    and wait for memory a tenth as much. Three products of a turn."""
    products: list[torch.Tensor] = []
    monkeypatch.setattr(widened, "WIDENS", widens)
    monkeypatch.setattr(widened, "product", lambda x, weight, bias: products.append(weight) or x)
    pair = Pair.__new__(Pair)
    rows, weights = torch.ones(2, 4).bfloat16(), [torch.ones(4, 4).bfloat16() for _ in range(3)]
    with torch.inference_mode():
        assert pair.computing(rows, weights) > 0
    assert len(products) == (3 * TURNS if widens else 0)

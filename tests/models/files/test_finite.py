"""Weights that are not finite are named, and never written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.errors import ModelError
from plait.models.files.finite import Broken, broken, describe, is_finite
from plait.models.files.saving import save_pretrained
from tests.models.tiny import tiny_model

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "finite"), [([], True), ([0.0, -1e38], True), ([1.0, NAN], False), ([INF], False), ([-INF, 0], False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_finite(values: list[float], finite: bool, dtype: torch.dtype) -> None:
    assert is_finite(torch.tensor(values, dtype=dtype)) is finite
    assert is_finite(torch.arange(3))


def test_the_first_are_named_with_their_counts_pieces_of_one_together() -> None:
    names = [("a", torch.tensor([1.0, NAN])), ("b", torch.ones(2)), ("a", torch.tensor([[INF, NAN, 2.0]]))]
    found = broken(names)
    assert found == [Broken("a", 1, 2), Broken("a", 2, 3)]
    assert describe(found) == "1 tensor is not finite: a (3 of 5 elements)"
    many = [Broken(name, 1, 9) for name in "abcde"]
    assert describe(many) == (
        "5 tensors are not finite: a (1 of 9 elements), b (1 of 9 elements), c (1 of 9 elements) and 2 more"
    )


def test_a_folder_of_such_weights_is_not_written_and_the_old_one_stays(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float32)
    save_pretrained(model, tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").read_bytes()
    with torch.no_grad():
        model.module.get_parameter("model.layers.0.mlp.up_proj.weight")[0, :2] = NAN
    with pytest.raises(ModelError, match=r"1 tensor is not finite: model.layers.0.mlp.up_proj.weight \(2 of \d+ "):
        save_pretrained(model, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

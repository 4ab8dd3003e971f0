"""Where a role that trains in bfloat16 finds all digits of its checkpoint: the numbers of its model, of any family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.models.loading import load_model, load_scalar
from plait.models.parallel.part_loading import PartLoader
from tests.models.tiny import save_tiny

KEPT = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "lfm2", "olmo2", "phi3")
CONVERTED = ("mixtral", "qwen3_moe", "deepseek_v3", "qwen3_5_text")


def loader(dtype: str = "bfloat16") -> PartLoader:
    return PartLoader(dtype=dtype, device="cpu", seed=0, head_std=0.0)


@pytest.mark.parametrize("scalar", [False, True], ids=["language", "scalar"])
@pytest.mark.parametrize("family", KEPT)
def test_the_weights_are_roundings_of_them(family: str, scalar: bool, tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path / "model", family=family))
    values = loader().stored(folder, scalar=scalar)
    assert values is not None
    model = load_scalar(folder, head_std=0.0) if scalar else load_model(folder)
    finer = 0
    for (block, start, stop), weights in zip(model.layout.entries, model.trained.flat.views, strict=True):
        stored = values(block)
        assert torch.equal(stored.bfloat16(), weights), block.param.name
        assert stop - start == weights.numel()
        finer += not torch.equal(stored.bfloat16().float(), stored)
    assert finer > 0, "else the weights have all digits"


@pytest.mark.parametrize("family", CONVERTED)
def test_tensors_that_are_converted_are_not_read(family: str, tmp_path: Path) -> None:
    assert loader().stored(str(save_tiny(tmp_path / "model", family=family))) is None


def test_what_has_no_more_digits_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(save_tiny(tmp_path / str(dtype), dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    monkeypatch.setattr(PartLoader, "without_weights", None)
    assert loader().stored(folders[0]) is None
    assert loader("float32").stored(folders[1]) is None

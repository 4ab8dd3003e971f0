"""Where a role that trains in bfloat16 finds all digits of its checkpoint: the numbers of its model, of any family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from plait.errors import ModelError
from plait.models.expert_adapters import low_rank
from plait.models.files import checkpoint_files
from plait.models.loading import load_model, load_scalar, merged
from plait.models.lora import add_lora
from plait.models.lora_files import save_adapter, stored_adapter
from plait.models.lora_settings import LoraSettings
from plait.models.parallel.part_loading import PartLoader
from tests.cases import slow_but
from tests.models.tiny import COMMON, FAMILIES, RECURRENT, save_tiny, tiny_tokenizer, tiny_with_images

QUICK = ("llama", "phi3", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_5_moe_text", "gpt_neox", "lfm2_moe")
SEEING = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 32}


def loader(dtype: str = "bfloat16") -> PartLoader:
    return PartLoader(dtype=dtype, device="cpu", seed=0, head_std=0.0)


def judge(folder: Path, *, scalar: bool = False) -> None:
    """The weights that training begins with are roundings of what is found, and that has more digits."""
    values = loader().stored(str(folder), scalar=scalar)
    assert values is not None
    load: Any = load_scalar if scalar else load_model
    model = load(str(folder), adapt=merged, **({"head_std": 0.0} if scalar else {}))
    finer = 0
    for (block, start, stop), weights in zip(model.layout.entries, model.trained.flat.views, strict=True):
        stored = values(block)
        assert stored is not None
        assert torch.equal(stored.bfloat16(), weights), block.param.name
        assert stop - start == weights.numel()
        finer += not torch.equal(stored.bfloat16().float(), stored)
    assert finer > len(model.layout.entries) / 2, "else the weights have all digits"


@pytest.mark.parametrize("scalar", [False, True], ids=["language", "scalar"])
@pytest.mark.parametrize("family", slow_but(QUICK, [*FAMILIES, *RECURRENT]))
def test_the_weights_are_roundings_of_them(family: str, scalar: bool, tmp_path: Path) -> None:
    """Also where Transformers converts what is stored: experts one by one, q, k and v as one, other names."""
    judge(save_tiny(tmp_path / "model", family=family), scalar=scalar)


@pytest.mark.parametrize("family", ["gemma3", "phi4_multimodal"])
def test_of_models_that_read_images(family: str, tmp_path: Path) -> None:
    tiny_with_images(family).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    judge(tmp_path)


def test_of_one_of_which_the_part_for_texts_is_read(tmp_path: Path) -> None:
    texts, seeing = {**COMMON, **RECURRENT["qwen3_5_text"]}, {**SEEING, "num_position_embeddings": 16}
    config = AutoConfig.for_model("qwen3_5", text_config=texts, vision_config=seeing)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    judge(tmp_path)


def test_experts_are_stacked_for_one_parameter_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the experts of a layer alone is anything read, and each number as the checkpoint has it."""
    folder = save_tiny(tmp_path / "model", family="mixtral")
    stored = load_file(folder / "model.safetensors")
    read: list[str] = []

    class Recording:
        def __init__(self, *of: Any) -> None:
            self._opened = safe_open(*of)

        def __enter__(self) -> Recording:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return getattr(self._opened, name)

        def get_tensor(self, name: str) -> Any:
            read.append(name)
            return self._opened.get_tensor(name)

    monkeypatch.setattr(checkpoint_files, "safe_open", Recording)
    values = loader().stored(str(folder))
    assert values is not None
    assert not read
    model = load_model(str(folder))
    block = next(b for b, _, _ in model.layout.entries if b.param.name == "model.layers.1.mlp.experts.gate_up_proj")
    found = values(block)
    names = [[f"model.layers.1.block_sparse_moe.experts.{at}.w{w}.weight" for w in (1, 3)] for at in range(4)]
    assert sorted(read) == sorted(name for of_one in names for name in of_one)
    assert found is not None
    assert torch.equal(found, torch.stack([torch.cat([stored[name] for name in of_one]) for of_one in names]))


@pytest.mark.parametrize("scalar", [False, True], ids=["language", "scalar"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_that_is_merged_is_added_in_float32(dtype: torch.dtype, scalar: bool, tmp_path: Path) -> None:
    """To the numbers that are stored, whatever they are, and rounded once; what it has no part of stays as it is."""
    pytest.importorskip("peft")
    base = save_tiny(tmp_path / "base", family="qwen3_moe", dtype=dtype)
    view: Any = add_lora(load_model(str(base), dtype="float32"), LoraSettings(rank=2), name="it", seed=1)
    with torch.no_grad():
        view.trained.weights.add_(torch.linspace(-0.1, 0.1, view.trained.layout.num_elements))
    save_adapter(view, tmp_path / "adapter")
    values = loader().stored(str(tmp_path / "adapter"), scalar=scalar)
    assert values is not None
    stored, (tensors, scaling) = load_file(base / "model.safetensors"), _tensors_of(tmp_path / "adapter", base)
    load: Any = load_scalar if scalar else load_model
    model = load(str(tmp_path / "adapter"), adapt=merged, **({"head_std": 0.0} if scalar else {}))
    adapted = 0
    for (block, _, _), weights in zip(model.layout.entries, model.trained.flat.views, strict=True):
        name = block.param.name
        found, at = values(block), name.removesuffix(".weight")
        if (a := tensors.get(f"{at}.lora_A.weight")) is not None:
            added = low_rank(a, tensors[f"{at}.lora_B.weight"], scaling, torch.float64)
            assert found is not None
            torch.testing.assert_close(found.double(), stored[name].double() + added, rtol=1e-6, atol=1e-7)
            adapted += 1
        if found is None:
            assert dtype == torch.bfloat16, name
        else:
            assert torch.equal(found.bfloat16(), weights), name
    assert adapted == len([name for name in tensors if name.endswith("lora_A.weight")]) > 0


def _tensors_of(folder: Path, base: Path) -> tuple[dict[str, torch.Tensor], float]:
    stored = stored_adapter(load_model(str(base), dtype="float32"), folder)
    return dict(stored.tensors), stored.settings.scaling


@pytest.mark.parametrize("equal", [True, False])
def test_tied_tensors_that_are_stored_twice(equal: bool, tmp_path: Path) -> None:
    """If they are not equal, Transformers does not tie them: which one a part has is not what is stored then."""
    folder = save_tiny(tmp_path / "model", family="llama")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = head if equal else head + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if equal:
        judge(folder)
    else:
        assert loader().stored(str(folder)) is None


def test_of_a_folder_with_shards_beside_the_whole(tmp_path: Path) -> None:
    """Transformers reads the one file: masters of other weights than the run computes with would be the other's."""
    folder = save_tiny(tmp_path / "model", family="llama")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "a.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    judge(folder)
    (folder / "model.safetensors").unlink()
    judge(folder)


@pytest.mark.parametrize("change", [lambda tensor: None, lambda tensor: tensor[:-1].clone()], ids=["gone", "shape"])
def test_experts_that_do_not_fit_together_are_named(change: Any, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", family="mixtral")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    tensors |= {name: change(tensors[name])}
    save_file({at: of for at, of in tensors.items() if of is not None}, folder / "model.safetensors", {"format": "pt"})
    said = (
        r"^model: '.*' cannot be read .* model\.layers\.0\.mlp\.experts\.gate_up_proj cannot be built from .*"
        r"block_sparse_moe\.experts\.0\.w1\.weight and \d others"
    )
    with pytest.raises(ModelError, match=said):
        loader().stored(str(folder))


def test_what_has_no_more_digits_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint that stores a few tensors in float32, those alone are."""
    folder = save_tiny(tmp_path / "mixed", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = loader().stored(str(folder))
    assert values is not None
    blocks = {block.param.name: values(block) for block, _, _ in load_model(str(folder)).layout.entries}
    assert [name for name, value in blocks.items() if value is not None] == ["model.norm.weight"]
    folders = [str(save_tiny(tmp_path / str(dtype), dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    monkeypatch.setattr(PartLoader, "without_weights", None)
    assert loader().stored(folders[0]) is None
    assert loader("float32").stored(folders[1]) is None

"""A checkpoint is data: no code that it brings is run, and nobody is asked whether it should be."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.cost.estimate import model_shape
from plait.cost.model_parameters import parameters_of
from plait.errors import ModelError
from plait.layout.params import Parameters
from plait.models.files.checkpoint_files import CheckpointFiles
from plait.models.files.pretrained import config_of, new_module
from plait.models.files.saving import save_pretrained
from plait.models.language_loading import from_module, load_model, read_folder
from plait.models.scalar_loading import load_scalar
from plait.models.working_weights import layout_of
from plait.recipes.role_models import RoleModel
from plait.runtime.inputs.tokenizers import load_tokenizer
from tests.models.tiny import save_tiny, tiny

CODE = """
import pathlib
pathlib.Path(__file__ + ".ran").touch()
pathlib.Path({ran!r}).touch()
class Custom:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with code beside it. Nobody answers a question."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    save_tiny(tmp_path / "model")
    (tmp_path / "model" / "custom.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    return tmp_path / "model"


def change(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("read", [load_tokenizer, load_model, load_scalar])
def test_a_tokenizer_that_needs_code_is_refused(folder: Path, tmp_path: Path, read: Any) -> None:
    auto_map = {"AutoTokenizer": ["custom.Custom", None]}
    change(folder / "tokenizer_config.json", tokenizer_class="Custom", auto_map=auto_map)
    with pytest.raises(ModelError, match=r"comes with code of its own for its tokenizer .* plait does not run"):
        read(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "llama"])
def test_a_folder_without_a_vocabulary_is_told(tmp_path: Path, family: str) -> None:
    """What Transformers puts in place of missing files reads any text as nothing, or as one unknown token. Of families
    where it puts nothing, it says what it would have made a tokenizer of."""
    tiny(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"^key `reward.model`: `.*` has no tokenizer .* has no vocabulary"):
        load_tokenizer(str(tmp_path), "reward.model")


@pytest.mark.parametrize("read", [model_shape, load_model, load_scalar])
def test_a_model_of_an_unknown_family_with_code_is_refused(folder: Path, tmp_path: Path, read: Any) -> None:
    auto_map = {"AutoConfig": "custom.Custom", "AutoModelForCausalLM": "custom.Custom", "AutoModel": "custom.Custom"}
    change(folder / "config.json", model_type="custom", auto_map=auto_map)
    with pytest.raises(ModelError, match=r"comes with code of its own for its (model|configuration)"):
        read(str(folder))
    assert not (tmp_path / "ran").exists()


def test_a_known_family_is_computed_by_transformers_class(folder: Path, tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "custom.Custom", "AutoModelForCausalLM": "custom.Custom"}
    change(folder / "config.json", auto_map=auto_map)
    assert type(load_model(str(folder), dtype="float32").module).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_kernels_that_a_configuration_names_are_not_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    change(folder / "config.json", attn_implementation="somebody/kernel")
    monkeypatch.setattr(
        modeling_utils, "lazy_import_flash_attention", lambda *_, **__: pytest.fail("a kernel is fetched")
    )
    assert new_module(config_of(folder, "it"), decoder_only=False).config._attn_implementation != "somebody/kernel"
    load_model(str(folder), dtype="float32")


def quantise(folder: Path) -> dict[str, torch.Tensor]:
    """Store a checkpoint's projections in 8 bits, in blocks of 16 by 16; what all its weights stand for then."""
    weights, stored = load_file(folder / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        blocks = weight.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))  # [O / 16, 16, I / 16, 16]
        scale = blocks.abs().amax((1, 3)) / 448
        eight_bits = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        stored[name] = eight_bits.view(weight.shape)
        stored[f"{name}_scale_inv"] = scale
        weights[name] = (eight_bits.float() * scale[:, None, :, None]).view(weight.shape)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    return weights


@pytest.mark.parametrize("has_gpu", [False, True])
def test_weights_in_8_bits_are_read_as_the_numbers_that_they_stand_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    """On a machine with a GPU, too, where Transformers would keep 8 bits and their scales apart."""
    expected = quantise(folder)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        module, tokenizer, _ = read_folder(str(folder), torch.float32)
    model = from_module(module, tokenizer, "float32")
    for name, weight in model.module.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=1e-6, atol=0)
    save_pretrained(model, folder.parent / "again")
    assert torch.equal(load_model(str(folder.parent / "again"), dtype="float32").weights, model.weights)


def test_parts_of_quantised_weights_are_not_read_as_they_stand(folder: Path) -> None:
    module = load_model(str(folder), dtype="float32").module
    parameters = Parameters.of(layout_of(module))
    assert CheckpointFiles.of(folder, module, parameters) is not None
    quantise(folder)
    config = config_of(folder, "it")
    assert CheckpointFiles.of(folder, new_module(config, decoder_only=False), parameters) is None
    assert "quantization_config" not in new_module(config, decoder_only=False).config.to_dict()
    assert config.quantization_config["dequantize"]


@pytest.mark.parametrize("read", [model_shape, load_model, load_scalar])
@pytest.mark.parametrize("stated", [{"quant_method": "awq", "bits": 4}, {"load_in_4bit": True}])
def test_weights_that_are_quantised_for_good_are_refused(folder: Path, read: Any, stated: dict[str, Any]) -> None:
    change(folder / "config.json", quantization_config=stated)
    with pytest.raises(ModelError, match=r"^model: the weights of .* are quantised .*(awq|no stated method).*Set"):
        read(str(folder))


@pytest.mark.parametrize("read", [model_shape, load_model, load_scalar])
def test_weights_in_a_file_of_another_name_are_refused(folder: Path, read: Any) -> None:
    """Transformers would load that file, whatever is checked and read of the one by the usual name."""
    change(folder / "config.json", transformers_weights="other.safetensors")
    with pytest.raises(ModelError, match=r"^model: .* 'other.safetensors' \(`transformers_weights`\); expected"):
        read(str(folder))


def _parameters(name: str) -> None:
    parameters_of([RoleModel("actor", name, scalar=False, trained=True, key="model")])


@pytest.mark.parametrize("read", [_parameters, load_model])
@pytest.mark.parametrize(
    "stated",
    [{"hidden_act": "nothing"}, {"rope_parameters": {"rope_type": "abc"}}, {"pad_token_id": 10**6}],
)
def test_what_transformers_makes_no_model_of_is_refused(folder: Path, read: Any, stated: dict[str, Any]) -> None:
    change(folder / "config.json", **stated)
    with pytest.raises(
        ModelError, match=r"^model: '.*' cannot be read as a causal language model: .*(nothing|abc|[Pp]ad)"
    ):
        read(str(folder))


@pytest.mark.parametrize("groups", [0, 3])
def test_heads_in_groups_of_unequal_sizes_are_refused(folder: Path, groups: int) -> None:
    change(folder / "config.json", num_attention_heads=4, num_key_value_heads=groups)
    with pytest.raises(ModelError, match=rf"states 4 heads .* and {groups} for keys and values .*, which should"):
        model_shape(str(folder))


def test_only_one_module_calls_transformers_auto_classes_and_never_trusts() -> None:
    """Read off the sources: who imports an `Auto…` class, and that every call of one is given `_DATA_ONLY`."""
    root = Path(plait.__file__).parent
    importing, calls = set(), []
    for path in root.rglob("*.py"):
        if "Auto" not in (text := path.read_text()) and path.name != "pretrained.py":
            continue  # it can import none
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                importing |= {path.name for alias in node.names if alias.name.startswith("Auto")}
            if (
                path.name == "pretrained.py"
                and isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("from_pretrained", "from_config")
                and ast.unparse(node.func.value) != "GenerationConfig"  # numbers alone
            ):
                calls.append(ast.unparse(node))
    assert importing == {"pretrained.py"}
    assert len(calls) == 4
    assert all("**_DATA_ONLY" in call for call in calls), calls


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"", "Expecting value at column 1"),
        (b"\0" * 8, "Expecting value at column 1"),
        (b"[]", "its header is no object"),
        (b'{"a": {}}', "the entry of 'a' in its header is damaged"),
        (b'{"a": 3}', "the entry of 'a' in its header is damaged"),
        (b'{"a": {"data_offsets": "x"}}', "the entry of 'a' in its header is damaged"),
        (b"[" * 9000, "lists and maps are nested more than"),
    ],
)
def test_a_damaged_header_is_said(folder: Path, header: bytes, said: str) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=rf"is damaged: model\.safetensors: {said}"):
        load_model(str(folder))


def test_a_header_that_lies_is_said(folder: Path) -> None:
    """As long as it says, but its tensors overlap."""
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    for read in (load_model, load_scalar):
        with pytest.raises(ModelError, match="cannot be read"):
            read(str(folder))

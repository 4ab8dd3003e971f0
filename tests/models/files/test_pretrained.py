"""A checkpoint is data: no code that it brings is run, and nobody is asked whether it should be."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.cost.estimate import model_shape
from plait.errors import ModelError
from plait.models.files.pretrained import config_of, new_module
from plait.models.language_loading import load_model
from plait.models.scalar_loading import load_scalar
from plait.runtime.inputs.tokenizers import load_tokenizer
from tests.models.tiny import save_tiny

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
    with pytest.raises(ModelError, match=r"brings code of its own along for its tokenizer .* plait does not run"):
        read(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("read", [model_shape, load_model, load_scalar])
def test_a_model_of_an_unknown_family_with_code_is_refused(folder: Path, tmp_path: Path, read: Any) -> None:
    auto_map = {"AutoConfig": "custom.Custom", "AutoModelForCausalLM": "custom.Custom", "AutoModel": "custom.Custom"}
    change(folder / "config.json", model_type="custom", auto_map=auto_map)
    with pytest.raises(ModelError, match=r"brings code of its own along for its (model|configuration)"):
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
            ):
                calls.append(ast.unparse(node))
    assert importing == {"pretrained.py"}
    assert len(calls) == 4
    assert all("**_DATA_ONLY" in call for call in calls), calls


@pytest.mark.parametrize(
    "header", [b"", b"\0" * 8, b"[]", b'{"a": {}}', b'{"a": 3}', b'{"a": {"data_offsets": "x"}}', b"[" * 9000]
)
def test_a_damaged_header_is_said(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"is damaged: model.safetensors has no header that can be read"):
        load_model(str(folder))


def test_a_header_that_lies_is_said(folder: Path) -> None:
    """As long as it says, but its tensors overlap."""
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    for read in (load_model, load_scalar):
        with pytest.raises(ModelError, match="cannot be read"):
            read(str(folder))

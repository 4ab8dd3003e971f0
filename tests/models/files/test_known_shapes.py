"""Shapes by name: their parameters are those that publishers count, and no weights are behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cost.estimate import model_shape
from plait.cost.model_parameters import needs_all_tokens, parameters_of
from plait.errors import ModelError
from plait.models.files.hub import ALIASES, read_config, resolve
from plait.models.files.known_shapes import KNOWN
from plait.models.shape import ModelShape
from plait.recipes.role_models import RoleModel

PUBLISHED = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}


def test_every_shape_is_checked() -> None:
    assert PUBLISHED.keys() == KNOWN.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_that_are_published(name: str) -> None:
    assert ModelShape.from_config(read_config(name), name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_a_module_of_the_configuration_has_as_many(name: str) -> None:
    (found,) = parameters_of([RoleModel("actor", name, False, True, "model")]).values()
    assert found.num_elements == PUBLISHED[name]


@pytest.mark.parametrize("name", [*KNOWN, *ALIASES])
def test_tokens_of_all_can_be_parted(name: str, tmp_path: Path) -> None:
    """As is taken for granted of what has these names, and found out of a file of the same configuration; of two
    layers, as all are alike."""
    path = tmp_path / "same.json"
    path.write_text(json.dumps({**read_config(name), "num_hidden_layers": 2}))
    for scalar in (False, True):
        assert needs_all_tokens(RoleModel("actor", str(path), scalar, True, "model")) == ""


def test_a_configuration_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**KNOWN["smollm2-135m"], "num_hidden_layers": 4}))
    assert model_shape(str(path)).layers == 4


@pytest.mark.parametrize("name", ["llama-7b", "config.json"])
def test_there_are_no_weights(name: str, tmp_path: Path) -> None:
    if name == "config.json":
        name = str(tmp_path / name)
        Path(name).write_text(json.dumps(KNOWN["llama-7b"]))
    with pytest.raises(ModelError, match="without weights or a tokenizer; forecasts and dry runs take it"):
        resolve(name)


def test_a_name_that_is_nearly_one() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'llama-13b'\?"):
        read_config("llama-13")


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{")
    with pytest.raises(ModelError, match=r"other\.json"):
        read_config(str(path))

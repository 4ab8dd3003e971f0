"""What a dry run says before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cost.device_memory import memory_of_plan
from plait.cost.estimate import model_shape
from plait.cost.lengths import Lengths, SampleLengths
from plait.cost.placement import resolve_plan
from plait.errors import ModelError
from plait.models.logits_room import HEAD_CHUNK_ROWS
from plait.models.shape import ModelShape
from plait.recipes.algorithm import load_flow, trace_algorithm
from plait.recipes.recipe import Recipe
from plait.recipes.role_models import role_models
from tests.models.tiny import MOE, tiny_config

TEN = SampleLengths(Lengths.fixed(10), Lengths.fixed(1))


def a_folder(path: Path, family: str, **overrides: object) -> str:
    """A checkpoint of which only the configuration is there."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(tiny_config(family, **overrides).to_dict()))
    return str(path)


def test_a_family_that_would_be_refused_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    assert model_shape(a_folder(tmp_path / "llama", "llama")).layers == 2
    with pytest.raises(ModelError, match=r"model: '.*it' \(family mamba\) is refused by the check of its layer types"):
        model_shape(a_folder(tmp_path / "it", "mamba"))
    with pytest.raises(ModelError, match="check of its layer types: 1 of 2 layers are chunked_attention"):
        model_shape(a_folder(tmp_path / "qwen2", "qwen2", layer_types=["chunked_attention", "full_attention"]))


def rows_of(model: str) -> tuple[dict[str, int], ModelShape]:
    """Of a run on one device, and the model's shape."""
    recipe = Recipe.model_validate({"model": model, "data": {"source": "x"}, "options": {"kl_coef": 0.1}})
    flow = trace_algorithm(load_flow("grpo"), recipe.options, ("actor", "ref", "reward"))
    models, shapes = role_models(flow, recipe), {model: model_shape(model)}
    plan = resolve_plan(recipe, flow, models, shapes)
    (alone,) = memory_of_plan(recipe, flow, models, shapes, plan, TEN)
    return dict(alone.rows), shapes[model]


def test_the_memory_of_a_run(tmp_path: Path) -> None:
    """Blocks of weights begin at multiples of 32 elements: norms of fewer are filled up."""
    table, shape = rows_of(a_folder(tmp_path / "llama", "llama"))
    assert table["actor: weights (bfloat16)"] == table["ref: weights (bfloat16)"]
    assert table["ref: weights (bfloat16)"] == pytest.approx(2 * shape.parameters, rel=0.01)
    assert table["actor: masters, moments and gradients"] == pytest.approx(16 * shape.parameters, rel=0.01)
    # the logits of a chunk, their exponentials and the gradient, the latter two in float32
    assert table["logits of one chunk"] == HEAD_CHUNK_ROWS * 320 * (2 + 4 + 4)
    table, mixture = rows_of(a_folder(tmp_path / "mixtral", "mixtral", **MOE | {"moe_intermediate_size": 48}))
    assert table["ref: weights (bfloat16)"] == pytest.approx(2 * mixture.parameters, rel=0.01)
    assert mixture.parameters > shape.parameters

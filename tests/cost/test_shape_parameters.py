"""Numbers that models and their adapters have, by shapes alone, against models."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from plait.cost.experts import fullest
from plait.cost.generation_memory import packed_bytes, widened_bytes
from plait.cost.shape_parameters import (
    adapter_by_stage,
    adapter_inputs,
    adapter_parameters,
    adapter_products,
    packed_adapter_parameters,
    parameters_of_shape,
)
from plait.layout.adapters import parameters_of_adapter
from plait.layout.mesh import Parallelism
from plait.layout.params import Parameters
from plait.layout.shards import shard
from plait.models.lora_settings import LoraSettings
from plait.models.shape import ModelShape
from tests.cost.test_model_costs import LAYER, SHAPE
from tests.models.tiny import tiny_model

pytest.importorskip("peft")

SETTINGS = [LoraSettings(rank=3), LoraSettings(rank=5, target_modules=("q_proj", "v_proj"))]
EXPERTS = LoraSettings(rank=2, target_modules=("all-linear", "experts.gate_up_proj", "experts.down_proj"))
DOWN = LoraSettings(rank=2, target_modules=("experts.down_proj",))


OF_FAMILIES = [
    (family, settings)
    for family in ("llama", "qwen2", "mixtral", "qwen3_moe", "qwen3_5_text", "qwen3_next", "lfm2")
    for settings in SETTINGS
] + [(family, settings) for family in ("mixtral", "qwen3_moe", "qwen3_next", "gpt_oss") for settings in (EXPERTS, DOWN)]


@pytest.mark.parametrize(("family", "settings"), OF_FAMILIES, ids=lambda value: getattr(value, "target_modules", value))
def test_adapters_have_as_many_numbers_as_those_of_a_model(family: str, settings: LoraSettings) -> None:
    """Of what A makes of a token, each expert that it passes makes as much as a layer does."""
    from plait.models.admission import check_config
    from plait.models.lora import add_lora

    model = tiny_model(family)
    view = add_lora(model, settings, name="actor", seed=0)
    shape = ModelShape.from_config(check_config(model.config.to_dict(), family), family)
    assert adapter_parameters(shape, settings) == sum(param.numel() for param in view.own.parameters.values())
    low = [param for name, param in view.own.parameters.items() if "lora_A" in name]
    passed = [settings.rank * (shape.experts_per_token if param.ndim == 3 else 1) for param in low]
    assert adapter_inputs(shape, settings) == sum(passed)


@pytest.mark.parametrize("settings", [*SETTINGS, EXPERTS], ids=lambda settings: f"rank {settings.rank}")
@pytest.mark.parametrize(
    "family", ["llama", "phi3", "gpt_neox", "deepseek_v3", "mixtral", "qwen2_moe", "gpt_oss", "qwen3_5_text", "lfm2"]
)
def test_the_parameters_of_an_adapter_follow_from_those_of_the_model(family: str, settings: LoraSettings) -> None:
    """Their names, shapes and cuts: what moves between the layouts of a role is forecast by them."""
    from plait.errors import ModelError
    from plait.models.lora import add_lora

    model = tiny_model(family)
    parameters = model.trained.parameters
    try:
        own = add_lora(model, settings, name="actor", seed=0).trained.parameters
    except ModelError:
        pytest.skip("its layers have other names")
    found = parameters_of_adapter(parameters, settings.rank, settings.linear, settings.experts).params
    if family == "gpt_oss" and settings.experts:  # a shape does not say that its experts lie transposed
        assert [(param.name, param.cut) for param in found] == [(param.name, param.cut) for param in own.params]
        assert sum(param.num_elements for param in found) == own.num_elements
    else:
        assert set(found) == set(own.params)


MIXTURE = replace(SHAPE, experts=4, experts_per_token=2, expert_layers=4, expert_intermediate=32)


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        ("q_proj",),
        ("qkv_proj", "o_proj"),
        ("query",),
        ("q_proj", "up_proj"),
        ("up_proj",),
        ("all-linear", "experts.down_proj"),
        ("q_proj", "experts.gate_up_proj"),
    ],
)
@pytest.mark.parametrize("shape", [SHAPE, MIXTURE], ids=["dense", "mixture"])
def test_what_moves_of_a_model_that_is_known_by_its_shape_has_as_many_numbers_as_its_adapter(
    shape: ModelShape, targets: Literal["all-linear"] | tuple[str, ...]
) -> None:
    """All layers, where a setting has names of another family; none of the MLPs of a mixture, and then maybe none."""
    settings = LoraSettings(rank=2, target_modules=targets)
    own = parameters_of_adapter(parameters_of_shape(shape), 2, settings.linear, settings.experts)
    assert own.num_elements == adapter_parameters(shape, settings)
    assert (own.num_elements > 0) == (shape is SHAPE or targets != ("up_proj",))


def test_the_head_of_a_scalar_model_is_trained_beside_its_adapter() -> None:
    from plait.models.lora import add_lora
    from plait.models.scalar_loading import scalar_view

    base = tiny_model("llama")
    model = scalar_view(base, seed=0)
    parameters = Parameters((*base.trained.parameters.params, *model.trained.parameters.params))
    own = add_lora(model, SETTINGS[0], name="critic", seed=0).trained.parameters
    assert set(parameters_of_adapter(parameters, 3, "all-linear").params) == set(own.params)
    assert sum(param.layer is None for param in own.params) == 1


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "olmo_hybrid", "lfm2"])
def test_parts_of_adapters_on_layers_that_keep_a_state(family: str) -> None:
    """Of each projection in one a rank has the rows of its key head in each part."""
    from plait.models.admission import check_config
    from plait.models.lora import add_lora

    model, settings = tiny_model(family), LoraSettings(rank=3)
    own = add_lora(model, settings, name="actor", seed=0).trained.parameters
    shape = ModelShape.from_config(check_config(model.config.to_dict(), family), family)
    part = shard(own, Parallelism(tp=2), 0, 0)
    assert adapter_parameters(shape, settings, 2) == sum(block.num_elements for block in part.blocks)


@pytest.mark.parametrize("sizes", [Parallelism(tp=2), Parallelism(tp=4), Parallelism(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"rank {settings.rank}")
def test_parts_of_adapters_have_as_many_numbers_as_those_of_a_model(settings: LoraSettings, sizes: Parallelism) -> None:
    """With four ranks, two of them have the same heads of keys and values."""
    from plait.models.lora import add_lora

    model = tiny_model("llama")
    own = add_lora(model, settings, name="actor", seed=0).trained.parameters
    shape = ModelShape.from_config(model.config.to_dict(), "llama")
    held = [
        max(sum(block.num_elements for block in shard(own, sizes, tp, pp).blocks) for tp in range(sizes.tp))
        for pp in range(sizes.pp)
    ]
    assert adapter_by_stage(shape, settings, sizes) == tuple(held)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3_moe", {"num_experts": 5, "num_local_experts": 5}), ("mixtral", {"intermediate_size": 50})],
    ids=["whole", "columns"],
)
def test_parts_of_adapters_of_experts(family: str, options: dict[str, int], tp: int) -> None:
    """Five whole experts on two or three ranks; of 50 columns, 17 of gate and as many of up on the first of three."""
    from plait.models.lora import add_lora

    settings = LoraSettings(rank=3, target_modules=("experts.gate_up_proj", "experts.down_proj"))
    model = tiny_model(family, **options)
    own = add_lora(model, settings, name="actor", seed=0).trained.parameters
    shape = ModelShape.from_config(model.config.to_dict(), family)
    held = [sum(block.num_elements for block in shard(own, Parallelism(tp=tp), at, 0).blocks) for at in range(tp)]
    assert adapter_parameters(shape, settings, tp) == max(held)


def test_a_token_passes_the_adapters_of_its_experts() -> None:
    """Two of four experts, of 64 to 2 · 32 and of 32 to 64, in each of four layers."""
    assert adapter_products(MIXTURE, DOWN) == 4 * 2 * 2 * (32 + 64)
    assert adapter_products(MIXTURE, EXPERTS) - adapter_products(MIXTURE, LoraSettings(rank=2)) == 4 * 2 * 2 * 224
    assert adapter_products(MIXTURE, DOWN, 2) == pytest.approx(fullest(MIXTURE, 2) * 4 * 2 * 2 * 96)
    wide = replace(MIXTURE, expert_intermediate=128)
    assert adapter_products(wide, DOWN, 2) == 4 * 2 * 2 * (64 + 64), "A has half of the inputs, B is whole"


def test_a_model_without_adapters_has_none() -> None:
    for none in (LoraSettings(), LoraSettings(rank=0, target_modules=("q_proj",))):
        assert adapter_parameters(SHAPE, none) == packed_adapter_parameters(SHAPE, none) == 0


def test_layers_by_names_of_another_family_are_counted_as_all() -> None:
    fused = LoraSettings(rank=2, target_modules=("qkv_proj", "o_proj"))
    assert adapter_parameters(SHAPE, fused) == adapter_parameters(SHAPE, LoraSettings(rank=2))
    assert adapter_parameters(SHAPE, LoraSettings(rank=2)) == 4 * 2 * (4 * (64 + 64) + 3 * (64 + 128))


def test_packed_adapters_of_one_product_lie_together() -> None:
    """Of q and v: rank 20 each is 40, which is two panels of 32 columns; B is for all 192 outputs of q, k and v."""
    lora = LoraSettings(rank=20, target_modules=("q_proj", "v_proj"))
    assert adapter_parameters(SHAPE, lora) == 4 * 20 * 2 * (64 + 64)
    assert packed_adapter_parameters(SHAPE, lora) == 4 * 64 * (64 + 192)
    assert (widened_bytes(100, "bfloat16"), widened_bytes(100, "float32")) == (100, 0)
    assert packed_bytes(SHAPE, "bfloat16", lora) == 2 * (4 * LAYER + 64 * 1000 + 4 * 64 * (64 + 192))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"rank {settings.rank}")
def test_they_are_what_a_compiled_forward_holds(settings: LoraSettings) -> None:
    """But for biases of panels, and outputs that fill no panel."""
    from plait.generation.dense_layers import adapters_of, decoder_layers, parts_of
    from plait.models.lora import add_lora

    model = tiny_model("llama")
    view = add_lora(model, settings, name="actor", seed=0)
    shape = ModelShape.from_config(model.config.to_dict(), "llama")
    layers = [parts_of(layer, "actor") for layer in decoder_layers(view.module.base_model).values()]
    found = 0
    for product in (product for layer in layers for product in layer.products):
        if any(part.adapter for part in product):
            low, ((high_OA, _),) = adapters_of(product)
            found += high_OA.shape[1] * (low[0][0].shape[1] + high_OA.shape[0])
    assert packed_adapter_parameters(shape, settings) == found

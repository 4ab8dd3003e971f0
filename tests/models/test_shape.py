"""Shapes read from configurations: against Transformers' own modules, and where numbers are missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plait.errors import ModelError
from plait.layout.shards import balanced_stages
from plait.models.admission import check_config
from plait.models.logits_room import head_chunk_bytes, head_chunk_rows
from plait.models.shape import ModelShape, config_fields, usable_positions
from tests.models.test_admission import REFUSED
from tests.models.tiny import FAMILIES, RECURRENT, tiny_config, tiny_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
ORIGINAL = "original_max_position_embeddings"
BY_FAMILY = [name for name, (check, _) in REFUSED.items() if check.startswith(("backend", "layer"))]
UNGATED = {"gpt2", "gpt_neox", "starcoder2"}
BIASED_EXPERTS = {"gpt_oss"}


def test_parameters_by_hand() -> None:
    block = 64 * 16 * (4 + 4 + 2 + 2) + 3 * 64 * 100 + 2 * 64
    assert ModelShape.from_config(LLAMA).parameters == 3 * block + 500 * 64 + 64
    mixture = LLAMA | {"num_local_experts": 8, "moe_intermediate_size": 20, "num_experts_per_tok": 2}
    shape = ModelShape.from_config(mixture)
    assert shape.parameters == 3 * (block - 3 * 64 * 100 + 8 * 3 * 64 * 20 + 64 * 8) + 500 * 64 + 64
    assert shape.active_intermediate == 40


def test_of_one_number_for_each_layer_the_largest_counts() -> None:
    """As gemma3n states the widths of its MLPs, and Hunyuan those of its experts."""
    assert ModelShape.from_config(LLAMA | {"intermediate_size": [100, 100, 80]}) == ModelShape.from_config(LLAMA)
    mixture = LLAMA | {"num_experts": 8, "moe_intermediate_size": [20] * 3, "num_experts_per_tok": [2, 2, 1]}
    shape = ModelShape.from_config(mixture)
    assert (shape.expert_intermediate, shape.experts_per_token) == (20, 2)


def test_the_head_in_layers_by_hand() -> None:
    attention, dense = 64 * 16 * (4 + 4 + 2 + 2), 3 * 64 * 100
    shape = ModelShape.from_config(LLAMA)
    assert shape.head_in_layers(500) == pytest.approx(500 * 64 / (attention + dense))
    assert shape.head_in_layers(1) == pytest.approx(64 / (attention + dense)), "a critic"
    mixture = {"num_experts": 8, "moe_intermediate_size": 20, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    per_token = 3 * 64 * 2 * 20 + 64 * 8  # two experts of eight, and the router
    found = ModelShape.from_config(LLAMA | mixture).head_in_layers(500)
    assert found == pytest.approx(500 * 64 / (attention + (dense + 2 * per_token) / 3)), "one dense layer of three"


def test_the_head_of_smollm2_135m_is_worth_eight_layers() -> None:
    config = LLAMA | {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    shape = ModelShape.from_config(config | heads)
    assert shape.head_in_layers(shape.vocabulary) == 8.0
    assert balanced_stages(shape.layers, 2, 8.0) == (19, 11)


@pytest.mark.parametrize("family", sorted((FAMILIES.keys() | RECURRENT.keys()) - UNGATED - BIASED_EXPERTS))
def test_parameters_are_those_of_the_module(family: str) -> None:
    """Norms of its own and biases apart, which are a hundredth of so small a model."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "qk_nope_head_dim": 48}
    if family == "mixtral":
        sizes["moe_intermediate_size"] = None  # the tiny table's, which Mixtral does not read
    config = tiny_config(family, **sizes)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    found = sum(param.numel() for param in module.parameters())
    shape = ModelShape.from_config(check_config(config.to_dict(), family))
    assert shape.parameters == pytest.approx(found, rel=0.01)


MIXERS = {"qwen3_5_text": "linear_attn", "olmo_hybrid": "linear_attn", "lfm2": "conv", "bamba": "mamba"}
GRANITE: dict[str, Any] = {  # as 4.0 Tiny
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "shared_intermediate_size": 1024,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "vocab_size": 100352,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131072,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "layer_types": ([*["mamba"] * 5, "attention", *["mamba"] * 4]) * 4,
}
NEMOTRON: dict[str, Any] = {  # as 3 Nano
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
}


@pytest.mark.parametrize(
    ("config", "billions", "kinds", "state_mib"),
    [
        (GRANITE, 6.939, (36, 4, 40, 0), 54.9),
        (NEMOTRON, 31.578, (23, 6, 23, 0), 47.1),
        ({**NEMOTRON, "moe_latent_size": 1024}, 13.520, (23, 6, 23, 0), 47.1),
    ],
    ids=["granite", "nemotron", "experts of fewer inputs"],
)
def test_models_with_mamba_2_as_they_are_published(
    config: dict[str, Any], billions: float, kinds: tuple[int, ...], state_mib: float
) -> None:
    """Of layers with states, with attention, with experts, and of dense ones; a sample's states in bfloat16."""
    shape = ModelShape.from_config(check_config(config, "it"))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    found = sum(param.numel() for param in module.parameters())
    assert found / 1e9 == pytest.approx(billions, abs=1e-3)
    assert shape.parameters == pytest.approx(found, rel=1e-4)
    assert (len(shape.recurrent), shape.attending, shape.expert_layers, shape.dense_layers) == kinds
    assert len(shape.recurrent) * shape.mixer.state_bytes(2) / 2**20 == pytest.approx(state_mib, abs=0.1)


@pytest.mark.parametrize("family", MIXERS)
def test_parameters_of_layers_that_keep_a_state_are_counted_exactly(family: str) -> None:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(tiny_config(family))
    shape = ModelShape.from_config(check_config(tiny_config(family).to_dict(), family))
    assert shape.parameters == sum(param.numel() for param in module.parameters())
    assert (shape.attending, shape.recurrent) == (1, (0, 2))
    mixer = getattr(module.model.layers[0], MIXERS[family])
    linear = {at: (part.in_features, part.out_features) for at, part in mixer.named_children() if "proj" in at}
    assert {at: sizes for at, *sizes in shape.mixer.linear} == {at: [*sizes] for at, sizes in linear.items()}


@pytest.mark.parametrize(
    ("family", "stated", "attending"),
    [
        ("qwen3_next", {"full_attention_interval": 4}, (3, 7)),  # as Qwen3-Next-80B-A3B is published
        ("qwen3_next", {}, (3, 7)),
        ("qwen3_5_text", {"full_attention_interval": 3}, (2, 5)),
        ("qwen3_5_moe_text", {}, (3, 7)),
        ("olmo_hybrid", {}, (3, 7)),
        ("olmo_hybrid", {"num_hidden_layers": 3}, (2,)),
        ("lfm2", {"full_attn_idxs": [2, 5]}, (2, 5)),
        ("lfm2", {}, range(8)),
        ("bamba", {"attn_layer_indices": [2, 5]}, (2, 5)),  # as Bamba-9B is published
        (
            "granitemoehybrid",
            {"layer_types": [*["mamba"] * 5, "attention", "mamba", "mamba"]},
            (5,),
        ),  # as Granite 4.0 is
    ],
)
def test_layers_that_keep_a_state_are_found_where_no_kinds_are_named(
    family: str, stated: dict[str, Any], attending: Sequence[int]
) -> None:
    config = LLAMA | {"model_type": family, "num_hidden_layers": 8, **stated}
    theirs = AutoConfig.for_model(**config).layer_types
    assert [layer for layer, kind in enumerate(theirs) if kind == "full_attention"] == list(attending)
    states = tuple(layer for layer in range(len(theirs)) if layer not in attending)
    assert ModelShape.from_config(config).recurrent == states


def test_layers_without_experts_are_told_apart() -> None:
    mixture = LLAMA | {"num_experts": 8, "moe_intermediate_size": 20}
    assert ModelShape.from_config(mixture | {"first_k_dense_replace": 1}).expert_layers == 2
    assert ModelShape.from_config(mixture | {"decoder_sparse_step": 2}).expert_layers == 1
    assert ModelShape.from_config(mixture | {"mlp_only_layers": [0, 2]}).expert_layers == 1
    assert ModelShape.from_config(mixture | {"mlp_layer_types": ["dense", "sparse", "sparse"]}).expert_layers == 2


@pytest.mark.parametrize(
    "missing", ["num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"]
)
def test_a_configuration_that_lacks_a_number_names_the_model_and_the_key(missing: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != missing}
    with pytest.raises(ModelError, match=rf"^model: .*'org/it' \(family llama\) lacks `{missing}`; set `model`"):
        ModelShape.from_config(config, "org/it")


def test_a_state_space_model_has_no_shape() -> None:
    with pytest.raises(ModelError, match="lacks `num_attention_heads`, `max_position_embeddings`"):
        ModelShape.from_config({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100})


@pytest.mark.parametrize(
    ("family", "stated", "layers"),
    [
        ("mistral", {}, range(8)),
        ("gemma2", {}, (0, 2, 4, 6)),
        ("gemma3_text", {}, (0, 1, 2, 3, 4, 6, 7)),
        ("gemma3_text", {"sliding_window_pattern": 3}, (0, 1, 3, 4, 6, 7)),
        ("cohere2", {}, (0, 1, 2, 4, 5, 6)),
        ("olmo3", {}, (0, 1, 2, 4, 5, 6)),
        ("gpt_oss", {}, (0, 2, 4, 6)),
        ("qwen2", {"max_window_layers": 6}, ()),
        ("qwen2", {"max_window_layers": 6, "use_sliding_window": True}, (6, 7)),
        ("qwen3", {"use_sliding_window": True}, ()),
        ("qwen2_moe", {"max_window_layers": 3, "use_sliding_window": True}, (0, 2)),
        ("qwen3_moe", {"use_sliding_window": True}, range(8)),
        ("qwen3_moe", {}, ()),
    ],
)
def test_windows_are_those_that_transformers_gives_the_layers(
    family: str, stated: dict[str, Any], layers: Sequence[int]
) -> None:
    config = LLAMA | {"model_type": family, "num_hidden_layers": 8, "sliding_window": 32, **stated}
    read = AutoConfig.for_model(**config)
    kinds = getattr(read, "layer_types", None) or ["sliding_attention"] * 8
    theirs = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention" and read.sliding_window]
    assert theirs == list(layers)
    windows = tuple(32 * (layer in layers) for layer in range(8)) if layers else ()
    assert ModelShape.from_config(config).windows == windows
    assert ModelShape.from_config(check_config(config, "it")).windows == windows


def test_layers_of_a_family_that_is_not_known_to_have_windows_see_all() -> None:
    assert ModelShape.from_config(LLAMA | {"model_type": "other", "sliding_window": 32}).windows == ()


# -- positions


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({}, 4096),
        ({"rope_scaling": None}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, 4096),
        ({"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}}, 64),
        ({"rope_scaling": {"type": "su", "long_factor": [2.0]}, "original_max_position_embeddings": 128}, 128),
        (
            {
                "rope_scaling": {**LONGROPE, "original_max_position_embeddings": 64},
                "original_max_position_embeddings": 32,
            },
            32,
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 4096),
        ({"rope_parameters": {"full_attention": {**LONGROPE, "original_max_position_embeddings": 64}}}, 64),
    ],
)
def test_positions_end_where_the_rotation_would_change(rope: dict[str, Any], positions: int) -> None:
    assert usable_positions(LLAMA | rope, "it") == positions
    assert ModelShape.from_config(LLAMA | rope).max_positions == positions


def test_the_loaded_model_and_its_config_file_agree() -> None:
    model = tiny_model("phi3", dtype=torch.float32, rope_parameters=dict(LONGROPE), original_max_position_embeddings=64)
    stored = model.config.to_dict()
    assert model.max_positions == ModelShape.from_config(stored).max_positions == 64
    assert tiny_model("gpt2", dtype=torch.float32).max_positions == 256
    assert config_fields(tiny_config("gpt2"))["max_position_embeddings"] == 256


# -- families, before anything is loaded


@pytest.mark.parametrize("family", [*FAMILIES, "mamba"])
def test_admission_by_the_configuration_alone(family: str) -> None:
    config = tiny_config(family).to_dict()
    if family == "mamba":
        with pytest.raises(ModelError, match=r"'org/it' \(family mamba\) is refused by the check of its layer types"):
            check_config(config, "org/it")
    else:
        assert check_config(config, "org/it")["num_attention_heads"] == 4


@pytest.mark.parametrize("family", BY_FAMILY)
def test_what_loading_refuses_by_its_family_is_refused_here(family: str) -> None:
    check, overrides = REFUSED[family]
    with pytest.raises(ModelError, match=rf"^model: 'it' .*{check}"):
        check_config(tiny_config(family, **overrides).to_dict(), "it")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt99"}, "the family 'gpt99', which this version of Transformers does not know"),
        ({}, "the family None"),
        ({"model_type": "vit"}, "the family vit, which has no causal language model"),
        ({"model_type": "llama", "hidden_size": "x"}, r"config\.json of 'it' cannot be read: .*hidden_size"),
    ],
)
def test_what_is_no_causal_language_model(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=rf"(?s)^model: .*{said}"):
        check_config(config, "it")


def test_rows_that_pass_the_head_at_a_time() -> None:
    """A chunk on a GPU takes up to 2 GiB: at 10 bytes a logit 1,412 rows of Qwen's vocabulary, 4,096 of SmolLM2's."""
    assert head_chunk_rows(49_152, 2, "cpu") == head_chunk_rows(10**9, 2, "cuda") == 256
    assert head_chunk_rows(10**9, 2, "cuda", is_fused=True) == 256
    assert head_chunk_rows(152_064, 2, "cuda", is_fused=True) == 4096
    assert head_chunk_rows(152_064, 2, "cuda") == 4096 * 2 // 10 == 819
    assert head_chunk_rows(262_144, 4, "cuda", is_fused=True) == 2**31 // (4 * 262_144) == 2048
    assert head_chunk_rows(49_152, 4, "cuda") == 4096 * 4 // 12 == 1365
    assert head_chunk_bytes(49_152, 2, "cuda") == pytest.approx(4096 * 2 * 49_152, rel=1e-2)

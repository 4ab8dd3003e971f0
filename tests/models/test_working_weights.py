"""Layouts of Transformers' own models: cuts come from their tensor-parallel plans, the rest from their parameters."""

from __future__ import annotations

import pytest
import torch

from plait.layout.holdings import weights, zero_shards
from plait.layout.mesh import Cluster, Layout
from plait.layout.params import Heads, Parameters
from plait.layout.shards import check
from plait.models.reach import unreached
from plait.models.working_weights import copy_module, layout_of, move_into_flat
from tests.layout.judge import judge
from tests.models.tiny import tiny, tiny_with_images


def parameters_of(family: str, **options) -> Parameters:
    module = tiny(family, **options)
    config = module.config
    return Parameters.of(layout_of(module), config.num_attention_heads, config.num_key_value_heads)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "phi3", "gpt_oss", "olmo2"]
)
def test_a_family_moves_between_layouts(family: str) -> None:
    parameters = parameters_of(family)
    cluster = Cluster(2, 2)
    before, after = Layout.on(range(4), tp=2, pp=2), Layout.on((3, 1, 0), tp=3)
    check(parameters, before, cluster)
    check(parameters, after, cluster)
    training = weights(parameters, before, "float32", "training")
    judge(training, weights(parameters, after, "float32", "generation"), cluster, chunk_bytes=1024)
    judge(zero_shards(parameters, Layout.on(range(4), dp=2, tp=2), "float32"), training, cluster, chunk_bytes=1024)


def test_what_a_family_says_of_its_parameters() -> None:
    by_name = {param.name: param for param in parameters_of("mixtral").params}
    at = "model.layers.1."
    assert by_name[at + "self_attn.q_proj.weight"].heads == Heads(4, 2)
    assert by_name[at + "self_attn.v_proj.weight"].heads == Heads(4, 2, shared=True)
    assert by_name[at + "self_attn.o_proj.weight"].heads == Heads(4, 2)
    assert by_name[at + "mlp.experts.gate_up_proj"].sections == 2
    assert by_name["model.embed_tokens.weight"].ends == "first"
    assert by_name["model.norm.weight"].ends == by_name["lm_head.weight"].ends == "last"


def test_a_tied_family() -> None:
    tied = parameters_of("llama", tie_word_embeddings=True)
    assert tied.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert tied.params[0].ends == "both"


@pytest.mark.parametrize(
    ("family", "texts"),
    [("gemma3", {"language_model"}), ("phi4_multimodal", {"embed_tokens", "layers", "norm"})],
)
def test_what_no_text_reaches_is_beside_the_buffer(family: str, texts: set[str]) -> None:
    """In the compute dtype, as its module may be asked for it; and once for a model and its copies."""
    module = tiny_with_images(family)
    layout, beside = layout_of(module), unreached(module)
    stored = {block.param.name for block in layout.blocks}
    assert {name.split(".")[1] for name in stored if name.startswith("model.")} == texts
    assert len(stored) + len(beside) == len(list(module.parameters()))
    before = [param.detach().clone() for param in beside]
    move_into_flat(module, layout, torch.float64, "cpu")
    assert all(torch.equal(param, old.double()) for param, old in zip(beside, before, strict=True))
    twin, weights = copy_module(module, layout)
    assert list(map(id, unreached(twin))) == list(map(id, beside))
    assert weights.numel() == layout.num_elements
    assert unreached(tiny("gemma3_text")) == []

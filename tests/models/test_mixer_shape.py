"""What a recurrent layer leaves for its backward, against what autograd keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.data.packed import pack
from plait.models.mixer_shape import MixerShape, mlp_width
from plait.models.shape import ModelShape
from tests.cases import slow_but
from tests.models.tiny import tiny_model

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 64, "vocab_size": 64}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 48}
SCAN = {"mamba_n_heads": 8, "mamba_d_state": 32, "mamba_chunk_size": 32}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HEADS,
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "bamba": SCAN,
}
CASES = [(family, dtype) for family in OF_FAMILY for dtype in (torch.float32, torch.bfloat16)]


def kept_by(family: str, dtype: torch.dtype, layers: int) -> tuple[float, MixerShape]:
    """Bytes of a token that layers of one kind, and what is around them, keep; one of these layers."""
    kinds = ["conv" if family == "lfm2" else "linear_attention"] * layers + ["full_attention"]
    sizes: dict[str, Any] = {**SIZES, **OF_FAMILY[family], "num_hidden_layers": layers + 1}
    sizes |= {"attn_layer_indices": [layers]} if family == "bamba" else {"layer_types": kinds}
    model = tiny_model(family, dtype=dtype, weight_scale=0.05, **sizes)
    batch = pack([([1] * 128, [[2] * 100] * 3)] * 2)
    params = {param.untyped_storage().data_ptr() for param in model.module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.logprobs(batch, 1.0)
    total = sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in params)
    return total / batch.num_tokens, ModelShape.from_config(model.config.to_dict()).mixer


@pytest.mark.parametrize(("family", "dtype"), slow_but(CASES[:1], CASES))
def test_what_is_kept_of_a_token_is_what_autograd_keeps(family: str, dtype: torch.dtype) -> None:
    """Beside the norms, residuals and the MLP of a layer, which are counted as those of layers that attend."""
    (two, mixer), (one, _) = kept_by(family, dtype, 2), kept_by(family, dtype, 1)
    width = dtype.itemsize
    is_fused = (family, dtype) == ("lfm2", torch.bfloat16)  # its norms and gates are of the common form
    between, within = (5 * width, 3 * width) if is_fused else (4 * width + 8, 4 * width)
    around = between * SIZES["hidden_size"] + within * SIZES["intermediate_size"]
    assert mixer.kept_bytes(width) + around == pytest.approx(two - one, rel=0.2)


def test_a_layer_by_hand() -> None:
    mixer = MixerShape(0, channels=24, taps=4, heads=2, key_dim=8, value_dim=4)
    assert mixer.scanned == 2 * (64 * (24 + 8) + 3 * 32)
    assert (mixer.state_bytes(2), mixer.state_bytes(8)) == (2 * 96 + 4 * 64, 8 * 160)


def test_a_layer_of_mamba_2_by_hand() -> None:
    """Two heads of 4 by 8 numbers, one group: 8 + 2 * 8 channels."""
    mixer = MixerShape(0, channels=24, taps=4, heads=2, key_heads=1, key_dim=8, value_dim=4, chunk=16)
    assert mixer.scanned == 2 * (16 * (8 + 4) + 2 * 32)
    assert mixer.state_bytes(2) == 2 * 96 + 4 * 64
    assert (mixer.units, mixer.most(2)) == (0, 1), "whole on each rank"
    assert replace(mixer, key_heads=2).most(2) == 1 / 2


def test_ranks_have_whole_key_heads_or_channels() -> None:
    """Two of four ranks have two of six key heads; of a layer that is not known each has all."""
    heads = MixerShape(0, channels=24, taps=4, heads=12, key_heads=6, key_dim=8, value_dim=4)
    assert [heads.most(tp) for tp in (1, 2, 4)] == [1, 1 / 2, 2 / 6]
    assert MixerShape(0, channels=24, taps=3).most(5) == 5 / 24
    assert MixerShape(100).most(2) == 1


def test_lfm2_makes_its_mlp_of_another_width_than_it_states() -> None:
    assert mlp_width({}, 48) == 48
    adjusted = {"block_auto_adjust_ff_dim": True, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    assert mlp_width(adjusted, 12288) == 8192
    assert mlp_width(adjusted, 6656) == 4608

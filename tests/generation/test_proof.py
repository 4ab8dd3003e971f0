"""What the proof of a compiled forward refuses: small errors of every part, also where rounding is larger than they."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.generation.compiled_forward import CompiledForward
from plait.generation.pool import KVPool
from plait.generation.proof import prove
from plait.generation.refused import Refused
from plait.kernels import paged_attention
from tests.cases import examples, slow_but
from tests.generation.spoilt import change_weights
from tests.models.tiny import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not all(map(paged_attention.fast, DTYPES)), reason="no numba, or a CPU without AVX2")


def times(factor: float) -> Callable[[Any, Any, Any], Any]:
    """A hook that changes what a part of the module gives."""

    def hook(_module: Any, _args: Any, out: Any) -> Any:
        return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

    return hook


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [0.99, 1.01])
@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_a_factor_on_what_one_layer_adds_is_refused(part: str, factor: float, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    getattr(model.module.model.layers[1], part).register_forward_hook(times(factor))
    with pytest.raises(Refused, match="its compiled layer 1 differs"):
        CompiledForward.of(model)


def test_a_factor_in_bfloat16_is_found_though_rounding_is_larger() -> None:
    """A layer adds little to what passes it, so 1.01 of it is less than the last place of the sum."""
    model = tiny_model("llama", dtype=torch.bfloat16, hidden_size=128, intermediate_size=256)
    with torch.no_grad():
        model.module.model.layers[1].mlp.down_proj.weight.mul_(0.02)
    CompiledForward.of(model)
    model.module.model.layers[1].mlp.register_forward_hook(times(1.05))
    with pytest.raises(Refused, match="differs from the module's by a factor of"):
        CompiledForward.of(model)


def other_scale(compiled: CompiledForward) -> None:
    compiled.settings.scales[0] *= 1.05


def no_window(compiled: CompiledForward) -> None:
    compiled.settings.windows[0] = 0


def wide_window(compiled: CompiledForward) -> None:
    """Off by one, as a mask may be."""
    decoded = compiled.decoded
    compiled.decoded = lambda *args, window=None: decoded(*args, window=window and window + 1)  # type: ignore[method-assign]


def far_angles(compiled: CompiledForward) -> None:
    angles = compiled.settings.angles

    def wrong(num_positions: int) -> Any:
        cos, sin = angles(num_positions)
        cos[100:] = cos[99]
        return cos, sin

    compiled.settings.angles = wrong  # type: ignore[method-assign]


def other_epsilon(compiled: CompiledForward) -> None:
    compiled.settings.eps = 0.05


def last_norm(compiled: CompiledForward) -> None:
    def larger(compiled: CompiledForward) -> None:
        assert compiled.weights is not None
        last_norm_H = compiled.weights.last_norm_H * np.float32(1.01)
        compiled.weights = compiled.weights._replace(last_norm_H=last_norm_H)

    change_weights(compiled, larger)


def head(compiled: CompiledForward) -> None:
    logits = compiled.logits

    def wrong(hidden_RH: Tensor) -> Tensor:
        return logits(hidden_RH) * 1.01

    compiled.logits = wrong  # type: ignore[method-assign]


def embeddings(compiled: CompiledForward) -> None:
    compiled.settings.embedding_scale = 1.01


def one_go(compiled: CompiledForward) -> None:
    """The layers are right, their order is not."""
    decoded = compiled.decoded

    def in_first(x_TH: Tensor, batch: Any, pool: KVPool, *layers: slice, **how: Any) -> Tensor:
        first: Any = SimpleNamespace(block_tokens=pool.block_tokens, layer=lambda layer, *like: pool.layer(0, *like))
        return decoded(x_TH, batch, first, *layers, **how)

    compiled.decoded = in_first  # type: ignore[method-assign]

    def first_again(compiled: CompiledForward) -> None:
        assert compiled.weights is not None
        compiled.weights.packed_L4[1] = compiled.weights.packed_L4[0]

    change_weights(compiled, first_again)


SABOTAGE = [other_scale, no_window, wide_window, far_angles, other_epsilon, last_norm, head, embeddings, one_go]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sabotage", SABOTAGE, ids=lambda sabotage: sabotage.__name__)
def test_an_error_in_any_part_is_refused(sabotage: Callable[[CompiledForward], None], dtype: torch.dtype) -> None:
    model = tiny_model("mistral", dtype=dtype)
    prove(CompiledForward(model))
    wrong = CompiledForward(model)
    sabotage(wrong)
    with pytest.raises(Refused, match=r"its (compiled|layers) "):
        prove(wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", slow_but(["qwen3", "gemma"], ["llama", "qwen3", "gemma", "granite"]))
def test_what_is_right_is_taken_whatever_the_weights(family: str, dtype: torch.dtype) -> None:
    for seed in range(examples(1, 3)):
        for scale in (0.02, 0.4):
            CompiledForward.of(tiny_model(family, dtype=dtype, seed=seed, weight_scale=scale))

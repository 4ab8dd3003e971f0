"""Which norms and gated MLPs of a family are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from plait.models.compute.layer_forms import GEMMA, GPT_OSS, LLAMA, Gate, Norm, NormForm, gate_of, norm_of, normalised
from tests.models.tiny import tiny


class ScaledRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


class ReadingRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * self.factor  # type: ignore[operator]


class ScaledMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("family", "form", "gate"),
    [
        ("llama", LLAMA, Gate.SILU),
        ("qwen3", LLAMA, Gate.SILU),
        ("gemma2", GEMMA, Gate.GELU_TANH),
        ("gpt_oss", GPT_OSS, None),
    ],
)
def test_forms_of_families(family: str, form: NormForm, gate: Gate | None) -> None:
    module = tiny(family)
    norms = [norm for part in module.modules() if (norm := norm_of(part)) is not None]
    assert len(norms) >= 5
    assert {norm.form for norm in norms} == {form}
    assert {norm.eps for norm in norms} == {module.config.rms_norm_eps}
    gates = [found for part in module.modules() if (found := gate_of(part)) is not None]
    assert gates == ([] if gate is None else [gate, gate])


@pytest.mark.parametrize("kind", [ScaledRMSNorm, ReadingRMSNorm])
def test_norms_of_another_form_are_not_known(kind: type[nn.Module]) -> None:
    assert norm_of(kind(16)) is None  # type: ignore[call-arg]
    assert norm_of(nn.Linear(3, 3)) is None


def test_mlps_of_another_form_are_not_known() -> None:
    config = tiny("llama").config
    assert gate_of(ScaledMLP(config)) is None
    mlp = LlamaMLP(config)
    assert gate_of(mlp) is Gate.SILU
    mlp.act_fn = nn.GELU()
    assert gate_of(mlp) is None
    mlp.act_fn = nn.GELU(approximate="tanh")
    assert gate_of(mlp) is Gate.GELU_TANH


@pytest.mark.parametrize("form", [LLAMA, GEMMA, GPT_OSS])
def test_a_norm_by_hand(form: NormForm) -> None:
    """mean(3², 4²) = 12.5; the root of 12.5 + 3.5 is 4."""
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, 10.0])
    found = normalised(x, weight, Norm(form, 3.5))
    assert found.tolist() == [[2.25, 11.0] if form is GEMMA else [1.5, 10.0]]

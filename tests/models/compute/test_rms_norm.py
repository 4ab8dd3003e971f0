"""The fused norm against its class to the bit, its gradient against float64; who is taken over and who is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from plait.kernels import fused_rows
from plait.models.compute import rms_norm
from tests.models.tiny import tiny_model

H = 40


class ScaledRMSNorm(LlamaRMSNorm):
    """Reads something that a norm of the common form does not have."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * self.factor  # type: ignore[operator]


def a_norm(kind: type[nn.Module] = LlamaRMSNorm, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    norm = kind(H, eps=1e-5).to(dtype)  # type: ignore[call-arg]
    norm.weight.data = torch.randn(H, generator=torch.Generator().manual_seed(0)).to(dtype)
    return norm


def activations(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    scale = torch.logspace(-2, 2, shape[-2])[:, None]
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().requires_grad_()


@pytest.mark.parametrize("shape", [(1, 600, H), (2, 300, H), (1, 600, 3, H)])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_value_to_the_bit_and_gradient_to_bfloat16(
    kind: type[nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_rows, "AVAILABLE", False)
    monkeypatch.setattr(rms_norm, "PIECE_ELEMENTS", 7 * H)  # pieces of 7 rows, the last one ragged
    fused, plain = a_norm(kind), a_norm(kind)
    rms_norm.install(fused)
    x = activations(*shape)
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    got, own = fused(x), plain(x)
    assert "_RMSNorm" in type(got.grad_fn).__name__
    assert torch.equal(got, own)

    exact, wide = a_norm(kind, torch.float64), x.detach().double().requires_grad_()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    expected = torch.autograd.grad(wide * inverse * exact.weight, [wide, exact.weight], direction.double())
    ours = torch.autograd.grad(got, [x, fused.weight], direction)
    theirs = torch.autograd.grad(own, [x, plain.weight], direction)
    for mine, other, true in zip(ours, theirs, expected, strict=True):
        assert (mine - true).norm() <= 1.01 * (other - true).norm(), "no farther from the truth than the class's own"


def test_a_frozen_weight_needs_no_gradient() -> None:
    norm = a_norm().requires_grad_(False)
    rms_norm.install(norm)
    out = norm(activations(1, 600, H))
    assert out.requires_grad
    out.sum().backward()
    assert norm.weight.grad is None


@pytest.mark.parametrize("kind", [GemmaRMSNorm, ScaledRMSNorm])
def test_a_norm_of_another_form_is_left_alone(kind: type[nn.Module]) -> None:
    norm = a_norm(kind)
    rms_norm.install(norm)
    assert "forward" not in vars(norm)


def test_few_or_wide_rows_other_dtypes_and_no_gradients_are_the_classes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_rows, "AVAILABLE", False)
    wide = LlamaRMSNorm(rms_norm.WIDEST + 8).bfloat16()
    rms_norm.install(wide)
    assert "_RMSNorm" not in type(wide(activations(1, 600, rms_norm.WIDEST + 8)).grad_fn).__name__
    norm = a_norm()
    rms_norm.install(norm)
    assert "_RMSNorm" not in type(norm(activations(1, 500, H)).grad_fn).__name__
    with torch.no_grad():
        assert norm(activations(1, 600, H)).grad_fn is None
    exact = a_norm(dtype=torch.float64)
    rms_norm.install(exact)
    assert "_RMSNorm" not in type(exact(torch.ones(1, 600, H, dtype=torch.float64)).grad_fn).__name__


def test_every_norm_of_a_model_is_taken_over_and_a_copy_has_its_own() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    norms = [part for part in model.module.modules() if isinstance(part, LlamaRMSNorm)]
    assert len(norms) == 5
    assert all(vars(norm)["forward"].norm is norm for norm in norms)
    twin = copy.deepcopy(model.module).model.norm
    assert vars(twin)["forward"].norm is twin


@pytest.mark.parametrize("compiled", [False, True])
def test_its_result_may_be_changed_in_place(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(fused_rows, "AVAILABLE", False)
    norm = a_norm()
    rms_norm.install(norm)
    x = activations(1, 600, H)
    out = norm(x)
    assert "_RMSNorm" in type(out.grad_fn).__name__
    (expected,) = torch.autograd.grad(out, x, torch.full_like(out, 2))
    (found,) = torch.autograd.grad(norm(x).mul_(2), x, torch.ones_like(out))
    assert torch.equal(found, expected)

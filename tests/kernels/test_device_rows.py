"""Norms and gates of training on a GPU against torch, by Triton's interpreter. Without triton these are skipped."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from plait.models.compute import gated_mlp, rms_norm
from tests.models.tiny import tiny

pytest.importorskip("triton", reason="triton is not installed: the norms of GPUs are not tested")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, whose kernels are interpreted (`tests/conftest.py`) and take tensors of a CPU."""
    from plait.kernels import device_kernels, device_rows, fused_rows

    if not device_kernels.INTERPRETED:
        pytest.skip("a GPU is here: TRITON_INTERPRET=1 has its kernels interpreted")
    monkeypatch.setattr(fused_rows, "takes", lambda *tensors: False)
    monkeypatch.setattr(device_rows, "takes", lambda *tensors: all(t.dtype == torch.bfloat16 for t in tensors))
    monkeypatch.setattr(device_rows, "BLOCK", 64)
    monkeypatch.setattr(gated_mlp, "kernels_for", lambda tensor: device_rows)
    return device_rows


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


NEAR = {"atol": 2e-2, "rtol": 2e-2}
"""Some roundings of bfloat16."""


@pytest.mark.parametrize(("rows", "hidden"), [(1, 8), (16, 24), (37, 64), (40, 100)])
def test_a_norm_is_that_of_float64(device: ModuleType, rows: int, hidden: int) -> None:
    x, weight, grad = drawn(rows, hidden), drawn(hidden, seed=1), drawn(rows, hidden, seed=2)
    wide = [tensor.double().requires_grad_() for tensor in (x, weight)]
    expected = wide[1] * wide[0] * torch.rsqrt(wide[0].square().mean(-1, keepdim=True) + 1e-3)
    out, inverse = device.normalised(x, weight, 1e-3)
    torch.testing.assert_close(out.double(), expected.detach(), **NEAR)
    torch.testing.assert_close(inverse, torch.rsqrt(x.float().square().mean(-1) + 1e-3))
    found = device.normalised_backward(x, weight, inverse, grad)
    for got, want in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("count", [1, 64, 65, 300])
def test_a_gate_is_that_of_float64(device: ModuleType, count: int) -> None:
    gate, up, grad = (4 * drawn(1, count, seed=seed) for seed in range(3))
    wide = [tensor.double().requires_grad_() for tensor in (gate, up)]
    expected = F.silu(wide[0]) * wide[1]
    torch.testing.assert_close(device.gated(gate, up).double(), expected.detach(), **NEAR)
    found = device.gated_backward(gate, up, grad)
    for got, want in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        torch.testing.assert_close(got.double(), want, atol=5e-2, rtol=2e-2)


def test_nothing_is_computed_of_no_rows(device: ModuleType) -> None:
    out, inverse = device.normalised(drawn(0, 8), drawn(8), 1e-3)
    assert (out.shape, inverse.shape) == ((0, 8), (0,))
    assert device.normalised_backward(out, drawn(8), inverse, out)[1].equal(torch.zeros(8))
    assert all(len(one) == 0 for one in (device.gated(out, out), *device.gated_backward(out, out, out)))


def test_a_module_computes_by_them_where_there_is_a_backward(
    device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama", dtype=torch.bfloat16).model
    layer = model.layers[0]
    called: list[str] = []
    for name in ("normalised", "normalised_backward", "gated", "gated_backward"):
        own = getattr(device, name)
        monkeypatch.setattr(device, name, lambda *given, own=own, name=name: (called.append(name), own(*given))[1])
    x = drawn(1, 9, model.config.hidden_size)

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        out = layer.mlp(layer.post_attention_layernorm(leaf))
        leaves = [leaf, layer.mlp.gate_proj.weight, layer.post_attention_layernorm.weight]
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    for parameter in layer.parameters():
        parameter.requires_grad_(True)
    plain = run()
    assert not called
    rms_norm.install(layer)
    gated_mlp.install(layer)
    assert isinstance(layer.post_attention_layernorm, LlamaRMSNorm)
    with torch.no_grad():
        layer.mlp(layer.post_attention_layernorm(x))
    assert not called, "generation compiles torch's own"
    ours = run()
    assert called == ["normalised", "gated", "gated_backward", "normalised_backward"]
    for got, want in zip(ours, plain, strict=True):
        # The interpreter cuts bfloat16 off where a GPU rounds: two parts of a thousand less, several times over.
        assert (got - want).float().norm() <= 5e-2 * want.float().norm()

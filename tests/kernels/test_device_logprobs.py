"""A head's log-probs against torch in float64: on a GPU where there is one, else by Triton's interpreter. Without
triton these are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from plait.models.compute import logprobs as chunked
from plait.models.head import Head
from tests import warm

pytest.importorskip("triton", reason="triton is not installed: the log-probs of GPUs are not tested")

pytestmark = [pytest.mark.cuda] if warm.HAS_GPU else []
WHERE = "cuda" if warm.HAS_GPU else "cpu"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module; tensors are of a GPU meanwhile, where there is one. Without, its kernels are interpreted
    (`tests/conftest.py`) and take tensors of a CPU."""
    from plait.kernels import device_logprobs, fused_rows

    monkeypatch.setattr(fused_rows, "takes", lambda *tensors: False)
    monkeypatch.setattr(device_logprobs, "takes", lambda *tensors: True)
    for block in ("FORWARD_BLOCK", "BACKWARD_BLOCK"):
        monkeypatch.setattr(device_logprobs, block, 64)
    with torch.device(WHERE):
        yield device_logprobs


def drawn(rows: int, vocabulary: int, scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator, device="cpu") * scale
    return logits.to(WHERE), torch.randint(vocabulary, (rows,), generator=generator, device="cpu").to(WHERE)


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 257])
@pytest.mark.parametrize("scale", [0.1, 30.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_says_what_float64_says(device: ModuleType, vocabulary: int, scale: float, temperature: float) -> None:
    logits, targets = drawn(6, vocabulary, scale)
    logits[0] -= 1000.0
    if vocabulary > 1:
        logits[1, (int(targets[1]) + 1) % vocabulary] = float("-inf")
    wide = logits.double().requires_grad_()
    logp = (wide / temperature).log_softmax(-1)
    expected = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)
    outputs = [torch.empty(6), torch.empty(6), torch.empty(6), torch.empty(6, dtype=torch.bool)]
    device.logprobs(logits, temperature, targets, *outputs)
    lse = (logits.double() / temperature).logsumexp(-1)
    for got, want in zip(outputs[:3], (expected, entropy, lse), strict=True):
        torch.testing.assert_close(got.double(), want.detach(), atol=2e-4, rtol=1e-5)
    assert outputs[3].equal(logits.gather(1, targets[:, None])[:, 0] == logits.amax(-1))
    slopes = torch.linspace(-1, 1, 6), torch.linspace(2, -1, 6)
    for which in ((True, False), (False, True), (True, True)):
        given = [slope if has else None for slope, has in zip(slopes, which, strict=True)]
        pairs = zip((expected, entropy), given, strict=True)
        total = sum((value * slope).sum() for value, slope in pairs if slope is not None)
        (want,) = torch.autograd.grad(total, wide, retain_graph=True)
        got = device.logprobs_backward_(logits.clone(), temperature, targets, outputs[2], outputs[1], *given)
        torch.testing.assert_close(got.double(), want.nan_to_num(0.0), atol=2e-4, rtol=1e-3)


def test_numbers_that_are_none_stay_so(device: ModuleType) -> None:
    logits, targets = drawn(2, 100, 1.0)
    logits[0, 5] = float("nan")
    outputs = [torch.empty(2), torch.empty(2), torch.empty(2), torch.empty(2, dtype=torch.bool)]
    device.logprobs(logits, 1.0, targets, *outputs)
    assert [bool(x.isfinite().all()) for x in torch.stack(outputs[:3]).unbind(1)] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_computes_by_it_in_chunks(
    device: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    layer = nn.Linear(16, 150, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(150, 16, generator=torch.Generator().manual_seed(0), device="cpu"))
    head = Head(layer, (layer.weight,), linear=True)
    hidden, targets = drawn(11, 16, 1.0)[0].to(dtype), drawn(11, 150, 1.0)[1]

    def run(rows: int) -> list[Tensor]:
        leaf = hidden.clone().requires_grad_()
        likeliest = torch.empty(11, dtype=torch.bool)
        found = chunked.chunked_logprobs(head, leaf, targets, 0.9, rows, likeliest_R=likeliest)
        grads = torch.autograd.grad((found[0] + 0.3 * found[1]).sum(), [leaf, layer.weight])
        return [found[0].detach(), found[1].detach(), likeliest.float(), *(grad.float() for grad in grads)]

    ours = run(4)
    monkeypatch.setattr(device, "takes", lambda *tensors: False)
    near = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 6e-2, "rtol": 3e-2}
    for got, want in zip(ours, run(4), strict=True):
        torch.testing.assert_close(got, want, **near)

"""Kernels of a head's logits are used where they are shown to say what torch's operators say."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.kernels import device_logprobs, fused_rows
from plait.kernels.logprob_kernels import LogprobKernels
from plait.models.compute.head_kernels import Logits, errors_of, is_proven
from plait.models.compute.logprobs import chunked_logprobs
from plait.models.head import Head

KIND = Logits(torch.device("cpu"), torch.float32, 300)


class StandIn:
    """What the kernels do, by torch in float64: log-probs times `factor`, gradients times `slope`."""

    def __init__(self, factor: float = 1.0, slope: float = 1.0) -> None:
        self.factor, self.slope, self.calls = factor, slope, 0

    def logprobs(self, logits_CV: Tensor, temperature: float, targets_C: Tensor, *outputs: Tensor) -> None:
        self.calls += 1
        scaled_CV = logits_CV.double() / temperature
        logp_CV = scaled_CV.log_softmax(-1)
        target_C = logits_CV.gather(1, targets_C[:, None])[:, 0]
        entropies_C = -(logp_CV.exp() * logp_CV).sum(-1)
        logprobs_C = logp_CV.gather(1, targets_C[:, None])[:, 0] * self.factor
        found = logprobs_C, entropies_C, scaled_CV.logsumexp(-1), target_C == logits_CV.amax(-1)
        for output, numbers in zip(outputs, found, strict=True):
            output.copy_(numbers)

    def logprobs_backward_(
        self, logits_CV: Tensor, temperature: float, targets_C: Tensor, lse_C: Tensor, entropies_C: Tensor, *grads: Any
    ) -> Tensor:
        with torch.enable_grad():
            leaf_CV = logits_CV.double().requires_grad_()
            logp_CV = (leaf_CV / temperature).log_softmax(-1)
            values = logp_CV.gather(1, targets_C[:, None])[:, 0], -(logp_CV.exp() * logp_CV).sum(-1)
            total = sum((value * grad).sum() for value, grad in zip(values, grads, strict=True) if grad is not None)
            (grad_CV,) = torch.autograd.grad(total, leaf_CV)
        return logits_CV.copy_(grad_CV * self.slope)


@pytest.mark.parametrize("kernels", [fused_rows, device_logprobs], ids=lambda module: module.__name__)
def test_modules_keep_to_the_interface(kernels: ModuleType) -> None:
    stated = {name: method for name, method in vars(LogprobKernels).items() if inspect.isfunction(method)}
    for name in ("takes", "logprobs", "logprobs_backward_"):
        of_self, *parameters = inspect.signature(stated[name]).parameters.values()
        assert of_self.name == "self"
        assert parameters == list(inspect.signature(getattr(kernels, name)).parameters.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_kernels_are_used_and_nothing_is_said(dtype: torch.dtype, capsys: pytest.CaptureFixture) -> None:
    kind, kernels = KIND._replace(dtype=dtype), StandIn()
    assert is_proven(kind, kernels)
    assert is_proven(kind, kernels)
    assert kernels.calls == 1
    assert capsys.readouterr().err == ""
    forward, backward = errors_of(kind, kernels)
    assert forward < 1e-6
    assert backward < (1e-5 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("wrong", [{"factor": 1.01}, {"slope": 1.1}, {"slope": float("nan")}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_say_something_else_are_not_used(
    wrong: dict[str, float], dtype: torch.dtype, capsys: pytest.CaptureFixture
) -> None:
    kind, kernels = KIND._replace(dtype=dtype), StandIn(**wrong)
    assert not is_proven(kind, kernels)
    assert not is_proven(kind, kernels)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("away from what torch's operators say: torch's operators compute them, slower")


def test_kernels_that_know_another_likeliest_token_are_not_used(capsys: pytest.CaptureFixture) -> None:
    class Wrong(StandIn):
        def logprobs(self, logits_CV: Tensor, temperature: float, targets_C: Tensor, *outputs: Tensor) -> None:
            super().logprobs(logits_CV, temperature, targets_C, *outputs)
            outputs[3].fill_(True)

    assert not is_proven(KIND, Wrong())
    assert "log-probs of training by one kernel are inf" in capsys.readouterr().err


def test_kernels_that_raise_are_not_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A head in chunks says the same by torch's operators, forward and backward; it is said once."""

    def broken(*args: Any) -> None:
        raise RuntimeError("no such instruction\nat line 3")

    layer = nn.Linear(16, 150, bias=False)
    head = Head(layer, (layer.weight,), linear=True)
    hidden_RH = torch.randn(11, 16, generator=torch.Generator().manual_seed(0))
    targets_R = torch.arange(11)

    def run() -> list[Tensor]:
        leaf_RH = hidden_RH.clone().requires_grad_()
        logprobs_R, entropies_R = chunked_logprobs(head, leaf_RH, targets_R, 0.9, 4)
        grads = torch.autograd.grad((logprobs_R + 0.3 * entropies_R).sum(), [leaf_RH, layer.weight])
        return [logprobs_R.detach(), entropies_R.detach(), *grads]

    expected = run()
    monkeypatch.setattr(device_logprobs, "takes", lambda *tensors: True)
    monkeypatch.setattr(device_logprobs, "logprobs", broken)
    monkeypatch.setattr(fused_rows, "takes", lambda *tensors: False)
    is_proven.cache_clear()
    try:
        for _ in range(2):
            for got, want in zip(run(), expected, strict=True):
                assert got.equal(want)
    finally:
        is_proven.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert "one kernel cannot be compiled here (RuntimeError: no such instruction): torch's operators" in line

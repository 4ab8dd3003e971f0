"""The input of products is kept by tokens, and gathered once in a backward for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from plait.models.compute import cpu_linear
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from plait.models.parallel.kept_tokens import KeptTokens, keeping
from tests.models.test_lora import stirred
from tests.models.tiny import tiny_model


class _Other:
    """The rank that has the other half of the tokens."""

    def __init__(self, whole: Tensor) -> None:
        self.whole, self.gatherings = whole, 0

    def gather(self, own: Tensor) -> Tensor:
        self.gatherings += 1
        return torch.cat([own[0], self.whole[0, own.shape[1] :]])[None]


def products(*, trains: int = 3) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = [nn.Linear(4, 5, dtype=torch.float64) for _ in range(3)]
    for product in made[trains:]:
        product.requires_grad_(False)
    return made


def gradients(made: list[nn.Linear]) -> list[Tensor]:
    return [product.weight.grad for product in made if product.weight.grad is not None]


def test_gradients_are_those_of_all_tokens_which_are_gathered_once() -> None:
    row = torch.randn(1, 6, 4, dtype=torch.float64)
    plain, kept_by = products(), products()
    sum(product(row).square().sum() for product in plain).backward()  # type: ignore[union-attr]

    whole, other = row.clone(), _Other(row)
    with keeping(KeptTokens(row[:, :2].clone(), other.gather), whole):
        outputs = [product(whole) for product in kept_by]
    loss = sum(output.square().sum() for output in outputs)
    for _ in range(2):  # a graph that is kept gathers again
        assert isinstance(loss, Tensor)
        loss.backward(retain_graph=True)
    assert other.gatherings == 2
    for found, expected in zip(gradients(kept_by), gradients(plain), strict=True):
        assert torch.equal(found, 2 * expected)


def test_no_product_keeps_all_tokens() -> None:
    row = torch.randn(1, 6, 4, dtype=torch.float64)
    for is_kept_by_tokens in (False, True):
        start = row.clone().requires_grad_()
        whole, other = start + 0, _Other(row)
        memory = StorageWeakRef(whole.untyped_storage())
        with keeping(KeptTokens(row[:, :2].clone(), other.gather), whole if is_kept_by_tokens else row):
            outputs = [product(whole) for product in products()]
        del whole
        assert memory.expired() == is_kept_by_tokens
        sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
        assert other.gatherings == is_kept_by_tokens


@pytest.mark.parametrize("by", [F.linear, cpu_linear.linear])
def test_frozen_products_ask_for_nothing(by: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever computes them, which may not be the same on all ranks: each has a part of another size."""
    monkeypatch.setattr(cpu_linear, "LEAST_PRODUCTS", 0)
    row = torch.randn(1, 6, 4)
    start = row.clone().requires_grad_()
    whole, other = start + 0, _Other(row)
    with keeping(KeptTokens(row[:, :2].clone(), other.gather), whole):
        outputs = [by(whole, product.weight.float(), product.bias.float()) for product in products(trains=0)]
    sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
    assert other.gatherings == 0
    assert start.grad is not None


@pytest.mark.parametrize("by", ["eager", "grouped_mm"])
def test_a_router_that_is_trained_asks_for_all_tokens_and_experts_with_adapters_for_none(by: str) -> None:
    """Experts take rows of their own of what enters, and keep these."""
    lora = LoraSettings(rank=3, target_modules=("experts.gate_up_proj", "experts.down_proj"))
    for adapted in (False, True):
        model: Any = tiny_model("qwen3_moe", dtype=torch.float32)
        if adapted:
            model = stirred(add_lora(model, lora, name="actor", seed=1))
            model.backbone.activate("actor")
        model.module.set_experts_implementation(by)
        row = torch.randn(1, 6, model.module.config.hidden_size)
        whole, other = row.clone().requires_grad_() + 0, _Other(row)
        with keeping(KeptTokens(row[:, :2].clone(), other.gather), whole):
            output = model.module.base_model.layers[0].mlp(whole)
        output.square().sum().backward()
        trained = model.own.parameters if adapted else dict(model.module.named_parameters())
        assert any(param.grad is not None for name, param in trained.items() if "experts.gate_up_proj" in name)
        assert other.gatherings == (not adapted)


def test_other_tensors_and_parts_of_the_row_are_saved_as_ever() -> None:
    row = torch.randn(1, 6, 4, dtype=torch.float64)
    whole, other = row.clone().requires_grad_(), _Other(row)
    with keeping(KeptTokens(row[:, :2].clone(), other.gather), whole):
        loss = whole[:, :3].square().sum() + (whole * 2).square().sum()
    loss.backward()
    assert other.gatherings == 0
    assert whole.grad is not None
    expected = 8 * row
    expected[:, :3] += 2 * row[:, :3]
    assert torch.allclose(whole.grad, expected)

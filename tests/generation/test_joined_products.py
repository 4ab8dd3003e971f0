"""Products that read one input are one product where their weights lie one behind another."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from plait.generation.joined_products import JoinedProducts
from plait.models.module_names import weights_side_by_side


class Attention(nn.Module):
    """Three products of one input, as Transformers names them; and one of another."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(6, 4, bias), nn.Linear(6, 2, bias), nn.Linear(6, 3, bias)
        self.o_proj = nn.Linear(9, 6, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1))


def in_one_buffer(module: nn.Module, names: Iterable[str] = ()) -> Tensor:
    """The weights of a module become views of a flat buffer, in the order of a model's or in this one."""
    params = dict(module.named_parameters())
    names = names or weights_side_by_side(params)
    buffer, start = torch.cat([params[name].detach().reshape(-1) for name in names]), 0
    for name in names:
        owner, _, leaf = name.rpartition(".")
        view = buffer[start : start + params[name].numel()].view(params[name].shape)
        setattr(module.get_submodule(owner), leaf, nn.Parameter(view))
        start += params[name].numel()
    return buffer


def products(module: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[tuple[int, ...]]]:
    """What it computes, and the shapes of the weights that it multiplies by."""
    shapes, linear = [], nn.functional.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append(tuple(weight.shape))
        return linear(x, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", counted)
        return module(x), shapes


def test_three_products_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Attention(), torch.randn(1, 5, 6)
    expected = module(x)
    buffer = in_one_buffer(module)
    joined, own = JoinedProducts([module]), module.q_proj
    for _ in range(2):  # nothing is left of the first time
        with torch.no_grad(), joined.applied():
            found, shapes = products(module, x, monkeypatch)
        torch.testing.assert_close(found, expected)
        assert shapes == [(9, 6), (6, 9)]
    assert module.q_proj is own
    buffer *= 2  # an update of the weights
    with torch.no_grad(), joined.applied():
        torch.testing.assert_close(module(x), 4 * expected)


def test_weights_that_lie_elsewhere_are_read_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Attention(), torch.randn(1, 5, 6)
    joined = JoinedProducts([module])
    with torch.no_grad(), joined.applied():
        assert products(module, x, monkeypatch)[1] == [(4, 6), (2, 6), (3, 6), (6, 9)]
    in_one_buffer(module)
    with torch.no_grad(), joined.applied():
        assert products(module, x, monkeypatch)[1] == [(9, 6), (6, 9)]
    module.k_proj.weight = nn.Parameter(module.k_proj.weight.detach().clone())
    with torch.no_grad(), joined.applied():
        assert products(module, x, monkeypatch)[1] == [(4, 6), (2, 6), (3, 6), (6, 9)]


def test_biases_that_lie_behind_the_weights_are_one_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Attention(bias=True), torch.randn(1, 5, 6)
    expected = module(x)
    in_one_buffer(module)
    with torch.no_grad(), JoinedProducts([module]).applied():
        found, shapes = products(module, x, monkeypatch)
    torch.testing.assert_close(found, expected)
    assert shapes == [(9, 6), (6, 9)]


def test_a_bias_between_two_weights_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Attention(bias=True)
    in_one_buffer(module, dict(module.named_parameters()))
    with torch.no_grad(), JoinedProducts([module]).applied():
        assert len(products(module, torch.randn(1, 5, 6), monkeypatch)[1]) == 4


def test_one_module_with_a_bias_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Attention()
    module.k_proj = nn.Linear(6, 2, True)
    in_one_buffer(module)
    with torch.no_grad(), JoinedProducts([module]).applied():
        assert len(products(module, torch.randn(1, 5, 6), monkeypatch)[1]) == 4


def test_modules_of_another_kind_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapted(nn.Linear):
        pass

    module = Attention()
    module.k_proj = Adapted(6, 2, False)
    in_one_buffer(module)
    with torch.no_grad(), JoinedProducts([module]).applied():
        assert len(products(module, torch.randn(1, 5, 6), monkeypatch)[1]) == 4


def test_two_inputs_are_refused() -> None:
    module = Attention()
    in_one_buffer(module)
    with JoinedProducts([module]).applied():
        module.q_proj(torch.zeros(1, 2, 6))
        with pytest.raises(AssertionError, match="one tensor"):
            module.k_proj(torch.zeros(1, 2, 6))

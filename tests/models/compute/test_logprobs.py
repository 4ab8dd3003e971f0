"""Chunked log-probs and entropies against full logits in float64; the head's fast path and the family's own."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from plait.data.packed import pack
from plait.data.supports import Supports, bits_of, encoded
from plait.models.compute.logprobs import chunked_logprobs
from plait.models.head import Head, find_head
from plait.models.language_loading import from_module
from tests.models.oracle import RAGGED, eager_logprobs, gradients, largest_error
from tests.models.tiny import tiny, tiny_llama, tiny_model

R, H, V = 23, 8, 41


def a_head(*, linear: bool, bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Head, nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(H, V, bias=bias, dtype=dtype)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return Head(layer, tuple(layer.parameters()), linear=linear), layer


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_RH = torch.randn(R, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden_RH, torch.randint(0, V, (R,), generator=generator)


def full(layer: nn.Linear, hidden_RH: Tensor, targets_R: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp_RV = (layer(hidden_RH) / temperature).log_softmax(-1)
    return logp_RV.gather(1, targets_R[:, None])[:, 0], -(logp_RV.exp() * logp_RV).sum(-1)


def test_by_hand() -> None:
    """Logits (ln 1, ln 2, ln 5) / 1: probabilities 1/8, 2/8, 5/8; at temperature 0.5 they are 1/30, 4/30, 25/30."""
    head = Head(lambda hidden: hidden, (), linear=False)
    logits = torch.tensor([[math.log(1), math.log(2), math.log(5)]], dtype=torch.float64)
    logprobs, entropies = chunked_logprobs(head, logits, torch.tensor([2]), 1.0)
    assert logprobs.item() == pytest.approx(math.log(5 / 8))
    assert entropies.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)))
    logprobs, entropies = chunked_logprobs(head, logits, torch.tensor([1]), 0.5)
    assert logprobs.item() == pytest.approx(math.log(4 / 30))
    assert entropies.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 30, 4 / 30, 25 / 30)))


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("linear", [False, True])
def test_the_likeliest_token_is_known(linear: bool, temperature: float, rows: int) -> None:
    """Against the argmax of full logits; every third target is it."""
    head, layer = a_head(linear=linear, bias=True)
    hidden_RH, targets_R = inputs()
    most_R = layer(hidden_RH).argmax(-1)
    targets_R[::3] = most_R[::3]
    likeliest_R = torch.empty(R, dtype=torch.bool)
    logprobs, _ = chunked_logprobs(head, hidden_RH, targets_R, temperature, rows, likeliest_R=likeliest_R)
    assert torch.equal(likeliest_R, targets_R == most_R)
    assert 8 <= likeliest_R.sum() < R
    expected, _ = full(layer, hidden_RH, targets_R, temperature)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-12)


def test_of_equally_likely_tokens_each_is_the_likeliest() -> None:
    head = Head(lambda hidden: hidden, (), linear=False)
    logits = torch.tensor([[1.0, 2.0, 2.0]] * 4 + [[float("nan"), 0.0, 0.0]], dtype=torch.float64)
    likeliest_R = torch.empty(5, dtype=torch.bool)
    chunked_logprobs(head, logits, torch.tensor([0, 1, 2, 0, 1]), 0.7, 2, likeliest_R=likeliest_R)
    assert likeliest_R.tolist() == [False, True, True, False, False], "nothing is known of a row with NaN"


@pytest.mark.parametrize("rows", [1, 5, 23, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("terms", ["both", "logprobs", "entropies"])
def test_values_and_gradients_equal_full_logits(linear: bool, bias: bool, rows: int, terms: str) -> None:
    head, layer = a_head(linear=linear, bias=bias)
    hidden_RH, targets_R = inputs()
    weights_R = torch.linspace(-1, 2, R, dtype=torch.float64)

    def loss(logprobs: Tensor, entropies: Tensor) -> Tensor:
        first = (weights_R * logprobs).sum() if terms != "entropies" else 0.0
        second = (weights_R.flip(0) ** 2 * entropies).sum() if terms != "logprobs" else 0.0
        return first + second

    expected = full(layer, hidden_RH, targets_R, 0.7)
    expected_grads = torch.autograd.grad(loss(*expected), [hidden_RH, *layer.parameters()])
    got = chunked_logprobs(head, hidden_RH, targets_R, 0.7, rows)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    got_grads = torch.autograd.grad(loss(*got), [hidden_RH, *layer.parameters()])
    for ours, theirs in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def some_supports(targets_R: Tensor) -> tuple[Supports, Tensor]:
    """What each row was drawn from, its target among it: one token, some, most, the whole vocabulary; and [R, V]."""
    generator = torch.Generator().manual_seed(2)
    share_R1 = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]).repeat(R)[:R, None]
    kept_RV = torch.rand(R, V, generator=generator) < share_R1
    kept_RV.scatter_(1, targets_R[:, None], value=True)
    return Supports(tuple(encoded(bits_of(kept_RV).numpy(), V))), kept_RV


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize(("linear", "bias"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("terms", ["both", "logprobs", "entropies"])
def test_within_supports_they_are_those_of_a_masked_softmax(linear: bool, bias: bool, rows: int, terms: str) -> None:
    """In float64, with a mask over full logits and its automatic gradient."""
    head, layer = a_head(linear=linear, bias=bias)
    hidden_RH, targets_R = inputs()
    supports, kept_RV = some_supports(targets_R)
    assert set(supports.counts_R.tolist()) >= {-1, 1}

    def loss(logprobs_R: Tensor, entropies_R: Tensor) -> Tensor:
        weights_R = torch.linspace(-1, 2, R, dtype=torch.float64)
        first = (weights_R * logprobs_R).sum() if terms != "entropies" else 0.0
        return first + ((weights_R.flip(0) ** 2 * entropies_R).sum() if terms != "logprobs" else 0.0)

    logits_RV = layer(hidden_RH) / 0.7
    logp_RV = logits_RV.masked_fill(~kept_RV, -torch.inf).log_softmax(-1)
    entropies_R = -(logp_RV.exp() * logp_RV.masked_fill(~kept_RV, 0.0)).sum(-1)
    expected = logp_RV.gather(1, targets_R[:, None])[:, 0], entropies_R
    got = chunked_logprobs(head, hidden_RH, targets_R, 0.7, rows, supports=supports)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert (got[0][supports.counts_R == 1] == 0).all(), "what could not be otherwise has probability 1"
    wanted = [hidden_RH, *layer.parameters()]
    grads, theirs = (torch.autograd.grad(loss(*numbers), wanted) for numbers in (got, expected))
    torch.testing.assert_close(grads, theirs, rtol=0, atol=1e-11)


def test_a_token_that_could_not_be_drawn_gets_no_gradient() -> None:
    """Not a small one: none, to the bit."""
    head, layer = a_head(linear=True, bias=True)
    hidden_RH, targets_R = inputs()
    kept_RV = torch.zeros(R, V, dtype=torch.bool)
    kept_RV[:, :7] = True
    supports = Supports(tuple(encoded(bits_of(kept_RV).numpy(), V)))
    logprobs_R, entropies_R = chunked_logprobs(head, hidden_RH, targets_R % 7, 0.7, 5, supports=supports)
    (logprobs_R.sum() + entropies_R.sum()).backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad[7:].count_nonzero() == 0
    assert layer.weight.grad[:7].count_nonzero() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("linear", [False, True])
def test_all_tokens_as_a_support_change_no_bit(linear: bool, dtype: torch.dtype) -> None:
    """Not as the short form of all, but as each of them."""
    head, layer = a_head(linear=linear, bias=False, dtype=dtype)
    hidden_RH, targets_R = inputs(dtype)
    bits = bits_of(torch.ones(R, V, dtype=torch.bool)).numpy()
    each = Supports((b"\1" + bits[0].tobytes(),) * R)
    assert each.counts_R.tolist() == [V] * R
    results = []
    for supports in (None, each):
        logprobs_R, entropies_R = chunked_logprobs(
            head, hidden_RH, targets_R, 0.9, 7, supports=supports, kept_bytes=999
        )
        grads = torch.autograd.grad(logprobs_R.sum() + entropies_R.sum(), [hidden_RH, *layer.parameters()])
        results.append((logprobs_R, entropies_R, *grads))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("linear", [False, True])
def test_within_supports_bfloat16_is_normalised_in_float32(linear: bool, kept_bytes: int) -> None:
    """Where one kernel computes with the logits, too; whether they stay for the backward or are computed again."""
    head, layer = a_head(linear=linear, bias=False, dtype=torch.bfloat16)
    hidden_RH, targets_R = inputs(torch.bfloat16)
    supports, kept_RV = some_supports(targets_R)
    got = chunked_logprobs(head, hidden_RH, targets_R, 0.9, 7, supports=supports, kept_bytes=kept_bytes)
    logits_RV = layer(hidden_RH).double().detach().requires_grad_()
    logp_RV = (logits_RV / 0.9).masked_fill(~kept_RV, -torch.inf).log_softmax(-1)
    entropies_R = -(logp_RV.exp() * logp_RV.masked_fill(~kept_RV, 0.0)).sum(-1)
    logprobs_R = logp_RV.gather(1, targets_R[:, None])[:, 0]
    assert (got[0].double() - logprobs_R).abs().max() < 1e-5
    assert (got[1].double() - entropies_R).abs().max() < 1e-5
    (got[0].sum() + got[1].sum()).backward()
    (of_logits_RV,) = torch.autograd.grad(logprobs_R.sum() + entropies_R.sum(), logits_RV)
    of_weight_VH = of_logits_RV.T @ hidden_RH.detach().double()
    assert layer.weight.grad is not None
    assert (layer.weight.grad.double() - of_weight_VH).norm() < 0.02 * of_weight_VH.norm()


@pytest.mark.parametrize("linear", [False, True])
def test_a_frozen_head_or_hidden_state_gets_no_gradient(linear: bool) -> None:
    head, layer = a_head(linear=linear, bias=True)
    hidden_RH, targets_R = inputs()
    layer.weight.requires_grad_(False)
    logprobs, _ = chunked_logprobs(head, hidden_RH.detach(), targets_R, 1.0, 5)
    logprobs.sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    layer.bias.requires_grad_(False)
    logprobs, _ = chunked_logprobs(head, hidden_RH, targets_R, 1.0, 5)
    logprobs.sum().backward()
    assert hidden_RH.grad is not None


@pytest.mark.parametrize("linear", [False, True])
def test_bfloat16_logits_are_normalised_in_float32(linear: bool) -> None:
    """The head's product is rounded to bfloat16; all after it is float32, as from the same rounded logits."""
    head, layer = a_head(linear=linear, bias=False, dtype=torch.bfloat16)
    hidden_RH, targets_R = inputs(torch.bfloat16)
    logprobs, entropies = chunked_logprobs(head, hidden_RH, targets_R, 0.9, 7)
    logp_RV = (layer(hidden_RH).double() / 0.9).log_softmax(-1)
    assert logprobs.dtype == entropies.dtype == torch.float32
    assert (logprobs.double() - logp_RV.gather(1, targets_R[:, None])[:, 0]).abs().max() < 1e-5
    assert (entropies.double() + (logp_RV.exp() * logp_RV).sum(-1)).abs().max() < 1e-5


def test_the_weight_gradient_of_many_chunks_is_summed_in_float32() -> None:
    """1 + 64 · 2⁻⁹: each small term alone would vanish when added to 1 in bfloat16."""
    weight = nn.Parameter(torch.zeros(2, 1, dtype=torch.bfloat16))
    hidden_RH = torch.tensor([[2.0]] + [[2.0**-8]] * 64, dtype=torch.bfloat16)
    targets_R = torch.zeros(65, dtype=torch.int64)
    logprobs, _ = chunked_logprobs(Head(lambda h: h @ weight.t(), (weight,), linear=True), hidden_RH, targets_R, 1.0, 1)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad[0].item() == 1.125  # each row gives (1 − ½) · hidden


def test_full_logits_never_exist() -> None:
    """The largest tensor that any operation of forward and backward makes has a chunk's rows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.shape[-1:] == (V,) and out.shape != (H, V):  # the weight's transpose
                Largest.elements = max(Largest.elements, out.numel())
            return out

    for linear in (False, True):
        head, _ = a_head(linear=linear, bias=False)
        hidden_RH, targets_R = inputs()
        with Largest():
            logprobs, entropies = chunked_logprobs(head, hidden_RH, targets_R, 0.7, 4)
            (logprobs.sum() + entropies.sum()).backward()
        assert Largest.elements == 4 * V


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "gpt_oss"])
def test_chunk_size_changes_nothing(family: str) -> None:
    model, batch = tiny_model(family), pack(RAGGED)
    whole = model.logprobs(batch, 0.7, chunk_rows=1000)
    cut = model.logprobs(batch, 0.7, chunk_rows=3)
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert largest_error(gradients(model.module, *whole), gradients(model.module, *cut)) < 1e-9


def test_the_fast_path_is_taken_where_it_is_equal_and_nowhere_else() -> None:
    linear = {family: tiny_model(family).head.linear for family in ("llama", "qwen2", "gemma2", "cohere", "granite")}
    assert linear == {"llama": True, "qwen2": True, "gemma2": False, "cohere": False, "granite": False}


def test_a_softcap_is_noticed_in_bfloat16() -> None:
    """30 · tanh(x / 30) rounds to x for small x: the proof looks at large logits too."""
    assert not find_head(tiny("gemma2", dtype=torch.bfloat16, final_logit_softcapping=30.0)).linear


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite", "gemma3_text", "gpt_oss"])
def test_logits_are_the_familys_own(family: str) -> None:
    module, model = tiny(family), tiny_model(family)
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = module.base_model(ids).last_hidden_state[0]
    torch.testing.assert_close(model.logits(hidden), module(ids).logits[0], rtol=0, atol=1e-12)


class WideCapped(LlamaForCausalLM):
    """Its softcap is taken in float32, as Beam's."""

    def forward(self, **inputs: Any) -> Any:
        out = super().forward(**inputs)
        out.logits = 3 * torch.tanh(out.logits.float() / 3)
        return out


def test_a_head_that_casts_to_float32_is_float64_in_a_model_of_float64() -> None:
    modules = tiny("llama"), tiny("llama")
    for module in modules:
        module.__class__ = WideCapped
    model = from_module(modules[0], None, "float64")
    got, expected = model.logprobs(pack(RAGGED), 1.0), eager_logprobs(modules[1], RAGGED)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert largest_error(gradients(model.module, *got), gradients(modules[1], *expected)) < 1e-12


def test_both_paths_give_one_model_the_same_gradients() -> None:
    model, batch = tiny_llama(), pack(RAGGED)
    fast = gradients(model.module, *model.logprobs(batch, 0.7))
    model.head = dataclasses.replace(model.head, linear=False)
    family = gradients(model.module, *model.logprobs(batch, 0.7))
    assert largest_error(fast, family) < 1e-10

"""Compiled passes of a bfloat16 forward and backward against torch's operations and float64; who takes part."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from plait.data.packed import pack
from plait.kernels import fused_rows
from plait.models.compute import cpu_linear, gated_mlp, layer_forms, logprobs, packed_attention, rms_norm, rope
from plait.models.compute.attention_form import AttentionForm
from plait.models.compute.head_chunks import Buffers
from plait.models.compute.logprobs import chunked_logprobs
from plait.models.head import Head
from plait.training.gradients import add_widened
from tests.models.tiny import tiny_model

pytestmark = pytest.mark.skipif(not fused_rows.AVAILABLE, reason="no numba, or a CPU without AVX2")

ROUNDING = 2.0**-8
"""The rounding of bfloat16, relative."""


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def plainly(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Tensor]) -> Tensor:
    """Without the kernels."""
    with monkeypatch.context() as context:
        context.setattr(fused_rows, "AVAILABLE", False)
        return compute()


def nearly(found: Tensor, expected: Tensor, differing: float = 1e-3) -> None:
    """Equal but for few numbers, which are rounded to the neighbour."""
    assert found.dtype == expected.dtype
    assert (found != expected).sum() <= differing * found.numel()
    torch.testing.assert_close(found, expected, rtol=2 * ROUNDING, atol=1e-6)


def no_farther(ours: Tensor, theirs: Tensor, true: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert (ours - true).norm() <= 1.01 * (theirs - true).norm() + 1e-12


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(fused_rows, "LEAST_ELEMENTS", 1)
    return request.param


@pytest.mark.parametrize("shape", [(1, 7, 24), (1, 601, 43), (0, 8)])
def test_gate_is_torchs_and_its_gradient_no_farther_from_the_truth(shape: tuple[int, ...], threads: int) -> None:
    gate, up, direction = (numbers(*shape, seed=seed, scale=3).requires_grad_() for seed in range(3))
    ours, theirs = gated_mlp.Gated.apply(gate, up), F.silu(gate) * up
    nearly(ours, theirs)
    in_place = gate.detach().clone()
    assert fused_rows.gated_(in_place, up) is in_place
    assert torch.equal(in_place, ours)
    wide = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
    true = torch.autograd.grad(F.silu(wide[0]) * wide[1], wide, direction.detach().double())
    mine = torch.autograd.grad(ours, (gate, up), direction.detach())
    other = torch.autograd.grad(theirs, (gate, up), direction.detach())
    for triple in zip(mine, other, true, strict=True):
        no_farther(*triple)


def test_gates_of_large_numbers_saturate() -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, 0.0, 90.0, 1e30]).bfloat16()
    one = torch.ones_like(gate)
    torch.testing.assert_close(fused_rows.gated(gate, one), F.silu(gate), rtol=0, atol=1e-30)
    of_gate, of_up = fused_rows.gated_backward(gate, one, one)
    assert torch.equal(of_gate, torch.tensor([0, 0, 0, 0.5, 1, 1]).bfloat16())
    torch.testing.assert_close(of_up, F.silu(gate), rtol=0, atol=1e-30)


@pytest.mark.parametrize("heads", [1, 5])
def test_rotation_is_the_familys_to_the_bit(heads: int, threads: int) -> None:
    cos, sin = numbers(1, 301, 16, seed=1), numbers(1, 301, 16, seed=2)
    query = numbers(1, 301, heads, 16).transpose(1, 2).requires_grad_()
    key = numbers(1, 301, 1, 16, seed=3).transpose(1, 2).requires_grad_()
    direction = numbers(1, heads, 301, 16, seed=4)
    ours, theirs = (of(query, key, cos, sin) for of in (lambda *x: rope.rotated(refused, *x), apply_rotary_pos_emb))
    assert all(map(torch.equal, ours, theirs))
    wide = query.detach().double().requires_grad_()
    rotated = apply_rotary_pos_emb(wide, wide, cos.double(), sin.double())[0]
    (true,) = torch.autograd.grad(rotated, wide, direction.double())
    (mine,), (other,) = (torch.autograd.grad(found[0], query, direction) for found in (ours, theirs))
    no_farther(mine, other, true)


def refused(*_: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("the family's own is called")


def test_rotated_queries_may_be_changed_in_place() -> None:
    cos, sin = numbers(1, 301, 16, seed=1), numbers(1, 301, 16, seed=2)
    query = numbers(1, 301, 2, 16).transpose(1, 2).requires_grad_()
    ones = torch.ones(1, 2, 301, 16).bfloat16()
    grads = []
    for change in (lambda x: x * 2, lambda x: x.mul_(2)):
        rotated, _ = rope.rotated(refused, query, query.detach(), cos, sin)
        grads += torch.autograd.grad(change(rotated), query, ones)
    assert torch.equal(*grads)


def test_rotations_of_another_form_are_the_familys_own() -> None:
    query, cos = numbers(1, 9, 2, 8).transpose(1, 2), numbers(1, 9, 8)
    cases = (
        (query.contiguous(), query, cos, cos),  # heads apart
        (query.float(), query.float(), cos.float(), cos.float()),
        (query, query, cos[..., :4], cos[..., :4]),
        (query, query, cos, cos, 1),
    )
    for case in cases:
        with pytest.raises(AssertionError, match="own is called"):
            rope.rotated(refused, *case)

    def other(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(query, key, sin, cos)

    assert layer_forms.rotation_of(apply_rotary_pos_emb) is layer_forms.Rotation.HALVES
    assert layer_forms.rotation_of(other) is None


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("shape", [(1, 3, 576), (2, 300, 40), (1, 200, 3, 16)])
def test_norm_is_the_classes_and_its_gradient_no_farther_from_the_truth(
    kind: type[nn.Module], shape: tuple[int, ...], threads: int
) -> None:
    fused = kind(shape[-1], eps=1e-5).bfloat16()  # type: ignore[call-arg]
    fused.weight.data = numbers(shape[-1])
    plain = copy.deepcopy(fused)
    rms_norm.install(fused)
    x = (numbers(*shape, seed=1) * torch.logspace(-2, 2, shape[1])[(...,) + (None,) * (len(shape) - 2)]).bfloat16()
    x.requires_grad_()
    direction = numbers(*shape, seed=2)
    ours, theirs = fused(x), plain(x)
    nearly(ours, theirs)
    with torch.no_grad():
        assert torch.equal(fused(x), ours), "with and without gradients"
    wide, weight = x.detach().double().requires_grad_(), plain.weight.detach().double().requires_grad_()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    true = torch.autograd.grad(normal * weight, [wide, weight], direction.double())
    mine = torch.autograd.grad(ours, [x, fused.weight], direction)
    other = torch.autograd.grad(theirs, [x, plain.weight], direction)
    for triple in zip(mine, other, true, strict=True):
        no_farther(*triple)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_that_of_torchs_softmax(window: int | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack([(range(5, 45), [range(30), range(1), ()]), (range(7), [range(11)]), (range(7), [range(11)])])
    query, key, value = (numbers(heads, batch.num_tokens, 16, seed=heads, scale=2) for heads in (4, 2, 2))
    plan = packed_attention.plan(batch, 4, window, torch.bfloat16)

    def attend() -> Tensor:
        return plan.attend(query, key, value, AttentionForm(0.25))

    torch.testing.assert_close(attend(), plainly(monkeypatch, attend), rtol=2 * ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(("num_rows", "num_keys", "masked"), [(3, 3, 3), (5, 37, 5), (33, 200, 200), (1, 1, 1)])
def test_probabilities_are_those_of_a_float32_softmax(num_rows: int, num_keys: int, masked: int, threads: int) -> None:
    scores = numbers(4, 2 * num_rows, num_keys, scale=4)
    bias = numbers(num_rows, masked, seed=1)
    bias[torch.ones(num_rows, masked).triu(1 + masked - num_rows).bool()] = -torch.inf
    biased = scores.float().view(4, 2, num_rows, num_keys).clone()
    biased[..., num_keys - masked :] += bias.float()
    expected = biased.softmax(-1).view(scores.shape).bfloat16()
    found = fused_rows.probabilities_(scores, bias)
    assert found is scores
    nearly(found, expected)
    assert torch.equal(found == 0, expected == 0), "what is hidden gets nothing"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("which", [(1, 0), (0, 1), (1, 1)])
def test_logprobs_and_their_gradients(
    temperature: float, which: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(numbers(301, 24))
    hidden = numbers(37, 24, seed=1, scale=0.7).requires_grad_()
    head = Head(lambda x: F.linear(x, weight), (weight,), linear=True)
    targets = torch.randint(301, (37,), generator=torch.Generator().manual_seed(2))
    directions = [torch.randn(37, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4)]

    def run() -> tuple[Tensor, ...]:
        likeliest = torch.empty_like(targets, dtype=torch.bool)
        outputs = chunked_logprobs(head, hidden, targets, temperature, rows=16, likeliest_R=likeliest)
        assert likeliest[5:9].all(), "their targets are the likeliest tokens"
        assert torch.equal(likeliest, logits.gather(1, targets[:, None])[:, 0] == logits.amax(-1))
        total = sum((out * by).sum() for out, by, on in zip(outputs, directions, which, strict=True) if on)
        return (*outputs, *torch.autograd.grad(total, (hidden, weight)))  # type: ignore[arg-type]

    logits = head.family(hidden)
    targets[5:9] = logits[5:9].argmax(-1)
    for ours, theirs in zip(run(), plainly(monkeypatch, run), strict=True):  # type: ignore[arg-type]
        wide = ours.dtype == torch.float32
        scale = 1.0 if wide else float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if wide else ROUNDING, atol=(1e-5 if wide else 0.01) * scale)


ROW_BYTES = 301 * 2


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("kept_rows", "kept"), [(0, []), (16, [16]), (21, [16, 5]), (36, [16, 16]), (37, [16, 16, 5]), (1000, [16, 16, 5])]
)
def test_logits_that_stay_are_not_computed_again(
    kept_rows: int, kept: list[int], in_place: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chunks of 16, 16 and 5 rows those that there is room for, and nothing else stays behind a forward, nothing
    behind a backward. To the bit the same; in a second backward, which finds none, too.

    Args:
        in_place: whether products are written into one buffer, as they are where a CPU has AVX-512 and on a GPU.
    """
    weight = nn.Parameter(numbers(301, 24))
    hidden = numbers(37, 24, seed=1, scale=0.7).requires_grad_()
    head = Head(lambda x: F.linear(x, weight), (weight,), linear=True)
    targets = torch.randint(301, (37,), generator=torch.Generator().manual_seed(2))
    if in_place:
        monkeypatch.setattr(cpu_linear, "pays", lambda num_rows, weight_OI: False)
    if not cpu_linear.pays(16, weight):  # the last chunk lies in the buffer of the second
        kept = [16] if kept_rows == 21 else kept
    computed: list[tuple[int, StorageWeakRef, int]] = []
    logits = Buffers.logits

    def noted(buffers: Buffers, hidden_CH: Tensor) -> Tensor:
        logits_CV = logits(buffers, hidden_CH)
        storage = logits_CV.untyped_storage()
        computed.append((len(logits_CV), StorageWeakRef(storage), storage.nbytes()))
        return logits_CV

    def held_bytes() -> int:
        return sum({ref.cdata: num_bytes for _, ref, num_bytes in computed if not ref.expired()}.values())

    monkeypatch.setattr(Buffers, "logits", noted)

    def run(kept_bytes: int) -> list[Tensor]:
        outputs = chunked_logprobs(head, hidden, targets, 0.9, rows=16, kept_bytes=kept_bytes)
        assert held_bytes() == (sum(kept) * ROW_BYTES if kept_bytes else 0)
        total, grads = (outputs[0] + 0.3 * outputs[1]).sum(), []
        for retain in (True, False):
            computed.clear()
            grads += torch.autograd.grad(total, (hidden, weight), retain_graph=retain)
            again = Counter((16, 16, 5)) - Counter(kept if retain and kept_bytes else ())
            assert Counter(rows for rows, *_ in computed) == again
            assert held_bytes() == 0
        return [*outputs, *grads]

    for ours, theirs in zip(run(kept_rows * ROW_BYTES), run(0), strict=True):
        assert ours.equal(theirs)
    room: list[int] = []
    monkeypatch.setattr(logprobs, "Buffers", lambda head, kept, *of: room.append(kept) or Buffers(head, kept, *of))
    with torch.no_grad():
        chunked_logprobs(head, hidden, targets, 0.9, rows=16, kept_bytes=1000 * ROW_BYTES)
    assert room == [0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_show(value: float) -> None:
    logits = numbers(2, 40)
    logits[0, 3] = value
    outputs, likeliest = torch.empty(3, 2), torch.empty(2, dtype=torch.bool)
    fused_rows.logprobs(logits, 1.0, torch.tensor([1, 1]), *outputs.unbind(), likeliest)
    assert not outputs[0, 0].isfinite()
    assert outputs[:, 1].isfinite().all()


@pytest.mark.parametrize("of_entropies", [False, True])
def test_a_token_that_cannot_be_drawn_has_no_gradient(of_entropies: bool) -> None:
    """Its logit is −∞, and it is the target of the second row, which does not count. The others have the gradients that
    they have without it."""
    logits, targets = numbers(2, 40), torch.tensor([1, 7])
    logits[:, 7] = -torch.inf
    outputs, likeliest = torch.empty(3, 2), torch.empty(2, dtype=torch.bool)
    fused_rows.logprobs(logits, 1.0, targets, *outputs.unbind(), likeliest)
    of_logprobs, by_entropies = torch.tensor([1.0, 0.0]), torch.tensor([0.5, -2.0])
    grads = of_logprobs, by_entropies if of_entropies else None
    ours = fused_rows.logprobs_backward_(logits.clone(), 1.0, targets, outputs[2], outputs[1], *grads)
    assert not ours[:, 7].any()
    others = [place for place in range(40) if place != 7]
    wide = logits[:, others].float().requires_grad_()
    logp = wide.log_softmax(-1)
    total = logp[0, 1] - of_entropies * (logp.exp() * logp).sum(-1) @ by_entropies
    (theirs,) = torch.autograd.grad(total, wide)
    torch.testing.assert_close(ours[:, others].float(), theirs, rtol=ROUNDING, atol=1e-4)


def test_sums_of_two_dtypes(threads: int) -> None:
    total, gradient = torch.randn(301, generator=torch.Generator().manual_seed(1)), numbers(43, 7)
    expected = total + gradient.flatten().float()
    add_widened(total, gradient)
    assert torch.equal(total, expected)


def test_rows_of_any_number_are_shared_out_to_the_same_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(fused_rows, "LEAST_ELEMENTS", 1)
    before = set(threading.enumerate())
    for num_rows in range(1, 12):
        x, weight = numbers(num_rows, 16), numbers(16, seed=1)
        fused_rows.normalised(x, weight, 1e-5)
    assert len(set(threading.enumerate()) - before) <= 7


def test_a_row_is_computed_from_that_row_alone() -> None:
    x, weight = numbers(300, 48), numbers(48, seed=1)
    whole, _ = fused_rows.normalised(x, weight, 1e-5)
    bias = torch.zeros(1, 48).bfloat16()
    probs = fused_rows.probabilities_(x[None].clone(), bias)[0]
    for at in (slice(0, 1), slice(17, 60), slice(299, 300)):
        assert torch.equal(fused_rows.normalised(x[at], weight, 1e-5)[0], whole[at])
        assert torch.equal(fused_rows.probabilities_(x[None, at].clone(), bias)[0], probs[at])


def test_layers_of_a_llama_are_taken_over_and_a_copy_has_its_own() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    layer = model.module.model.layers[0]
    twin = copy.deepcopy(model.module).model.layers[0]
    for one in (layer, twin):
        assert vars(one.mlp)["forward"].mlp is one.mlp
        assert vars(one.self_attn)["forward"].__self__ is one.self_attn


def test_an_attention_that_is_decorated_keeps_its_decorators_and_rotates_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers renames an argument now and then, and takes the old name as well for some releases."""
    plain = inspect.unwrap(LlamaAttention.forward)
    calls = []

    @functools.wraps(plain)
    def renamed(self: nn.Module, *args: Any, old: Any = None, **kwargs: Any) -> Any:
        calls.append(old)
        return plain(self, *args, **kwargs)

    batch = pack([(range(3, 20), [range(5, 30), range(9)])])
    expected = tiny_model("llama", dtype=torch.bfloat16).logprobs(batch, 1.0)[0]
    monkeypatch.setattr(LlamaAttention, "forward", renamed)
    model = tiny_model("llama", dtype=torch.bfloat16)
    ours = [vars(layer.self_attn)["forward"] for layer in model.module.model.layers]
    assert all(isinstance(inspect.unwrap(one).__globals__[rope.NAME], functools.partial) for one in ours)
    calls.clear()
    assert torch.equal(model.logprobs(batch, 1.0)[0], expected)
    assert calls == [None, None]


def test_a_decorator_that_does_not_call_what_it_wraps_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = inspect.unwrap(LlamaAttention.forward)

    @functools.wraps(plain)
    def other(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return LlamaAttention.first(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "first", LlamaAttention.forward, raising=False)
    monkeypatch.setattr(LlamaAttention, "forward", other)
    layer = tiny_model("llama", dtype=torch.bfloat16).module.model.layers[0]
    assert "forward" not in vars(layer.self_attn)


def test_what_is_proven_does_not_depend_on_where_tensors_are_made() -> None:
    with torch.device("meta"):
        assert layer_forms.rotation_of.__wrapped__(apply_rotary_pos_emb) is not None
        assert layer_forms.is_gated.__wrapped__(LlamaMLP)


def test_an_mlp_of_another_form_is_left_alone() -> None:
    class Scaled(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert layer_forms.is_gated(LlamaMLP)
    assert not layer_forms.is_gated(Scaled)
    gemma = tiny_model("gemma", dtype=torch.bfloat16).module.model.layers[0].mlp
    assert isinstance(gemma, GemmaMLP)
    assert "forward" not in vars(gemma)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_other_dtypes_are_untouched(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=dtype)
    batch = pack([(range(3, 20), [range(5, 30), range(9)])])
    assert not fused_rows.takes(model.weights)

    def run() -> Tensor:
        return model.logprobs(batch, 0.9)[0].detach()

    assert torch.equal(run(), plainly(monkeypatch, run))


def test_a_bfloat16_model_with_gradients_has_the_bits_of_one_without() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    batch = pack([(range(3, 20), [range(5, 30), range(9)]), (range(4), [range(8)])])
    with torch.no_grad():
        scored = model.logprobs(batch, 0.9)
    model.module.requires_grad_(True)
    trained = model.logprobs(batch, 0.9)
    assert trained[0].requires_grad
    assert all(map(torch.equal, trained, scored))

"""oneDNN's linear layers against float64 and F.linear; packed weights; adapters, copies and saving keep the hook."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.data.records import Prompt
from plait.generation.compiled_forward import CompiledForward
from plait.generation.engine import Engine, drain
from plait.generation.forward import PACK_STEPS
from plait.generation.refused import Refused
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels.noise import NoiseKey
from plait.models.backbone_model import copy_of
from plait.models.compute import cpu_linear
from plait.models.compute import widened as widened_
from plait.models.compute.cpu_linear import LEAST_PRODUCTS, PackedLinears, install, linear
from plait.models.language_loading import from_module
from plait.models.language_model import LanguageModel
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from tests.generation.requests import is_packed
from tests.models.tiny import tiny, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.skipif(not cpu_linear.AVAILABLE, reason="this torch lacks the operators")

N, FROM, TO = 96, 80, 112


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of every size go through oneDNN, weight gradients in pieces of ragged length."""
    monkeypatch.setattr(cpu_linear, "LEAST_PRODUCTS", 0)
    monkeypatch.setattr(cpu_linear, "GRADIENT_ROWS", 37)


def _prompt(uid: int, token_ids: Iterable[int]) -> Prompt:
    return Prompt(uid, "", tuple(token_ids))


def operands(dtype: torch.dtype, rows: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, FROM), (TO, FROM), (TO,))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(N, FROM), (1, N, FROM), (4, N // 4, FROM), (1, FROM)])
@pytest.mark.usefixtures("always")
def test_value_and_gradients_are_as_near_to_float64_as_those_of_torch(shape: tuple[int, ...], with_bias: bool) -> None:
    x, weight_OI, bias_O = operands(torch.float32)
    x = x[: torch.Size(shape[:-1]).numel()].view(shape)
    leaves = [x, weight_OI, bias_O] if with_bias else [x, weight_OI]
    direction = torch.randn(*shape[:-1], TO, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(function: object, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        out = function(*inputs)  # type: ignore[operator]
        return [out.detach(), *torch.autograd.grad(out, inputs, direction.to(dtype))]

    exact = run(F.linear, torch.float64)
    ours, plain = run(linear, torch.float32), run(F.linear, torch.float32)
    for mine, theirs, true in zip(ours, plain, exact, strict=True):
        assert mine.shape == true.shape
        error, allowed = (mine - true).abs().max(), 4 * (theirs - true).abs().max() + 1e-6
        assert error <= allowed, f"error {error:.2g}, of F.linear {allowed:.2g}"


@pytest.mark.usefixtures("always")
def test_a_transposed_gradient_and_a_frozen_weight() -> None:
    """Which keeps no input, as that of `F.linear`."""
    x, weight_OI, _ = operands(torch.float32)
    x.requires_grad_()
    kept = set[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: (kept.add(saved.data_ptr()), saved)[1], lambda it: it):
        out = linear(x, weight_OI)
    assert kept == {weight_OI.data_ptr()}
    (grad,) = torch.autograd.grad(out.t().contiguous().t().sum(), [x])
    torch.testing.assert_close(grad, weight_OI.sum(0).expand(N, FROM), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened_, "WIDENS", False)
    x, weight_OI, bias_O = operands(dtype)
    assert not cpu_linear.pays(1 << 20, weight_OI)
    assert torch.equal(linear(x, weight_OI, bias_O), F.linear(x, weight_OI, bias_O))
    assert torch.equal(cpu_linear.input_gradient(x @ weight_OI.t(), weight_OI), x @ weight_OI.t() @ weight_OI)


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without instructions for bfloat16, weights in pieces of ragged length."""
    monkeypatch.setattr(widened_, "WIDENS", True)
    monkeypatch.setattr(widened_, "WIDENED_WEIGHTS", 37 * FROM)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(N, FROM), (2, N // 2, FROM), (1, FROM)])
@pytest.mark.usefixtures("widened")
def test_products_of_bfloat16_are_summed_in_float32_and_rounded_once(shape: tuple[int, ...], with_bias: bool) -> None:
    x, weight_OI, bias_O = operands(torch.bfloat16)
    x = x[: torch.Size(shape[:-1]).numel()].view(shape)
    leaves = [x, weight_OI, bias_O] if with_bias else [x, weight_OI]
    direction = torch.randn(*shape[:-1], TO, generator=torch.Generator().manual_seed(1)).bfloat16()

    def run(function: object, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        out = function(*inputs)  # type: ignore[operator]
        grads = torch.autograd.grad(out, inputs, direction.to(dtype))
        return [out.detach(), *grads[:2]]  # that of the bias is torch's own sum

    ours = run(linear, torch.bfloat16)
    for mine, true in zip(ours, run(F.linear, torch.float64), strict=True):
        assert mine.dtype == torch.bfloat16
        half_a_step = 2.0**-8 * true.abs() + 1e-5
        assert ((mine.double() - true).abs() <= 1.01 * half_a_step).all()
    with torch.no_grad():
        assert torch.equal(linear(*leaves), ours[0])


@pytest.mark.usefixtures("widened")
def test_batched_products_of_bfloat16_are_summed_in_float32_and_rounded_once() -> None:
    left_BNK, right_BKM = (
        torch.randn(3, *size, generator=torch.Generator().manual_seed(0)) for size in ((5, 70), (70, 9))
    )
    left_BNK, right_BKM = left_BNK.bfloat16(), right_BKM.bfloat16()
    true_BNM = left_BNK.double() @ right_BKM.double()
    for mine_BNM, scale in (
        (widened_.batched_product(left_BNK, right_BKM), 1.0),
        (widened_.scaled_batched_product(left_BNK, right_BKM, 0.3), 0.3),
    ):
        assert mine_BNM.dtype == torch.bfloat16
        error_BNM = (mine_BNM.double() - scale * true_BNM).abs()
        assert (error_BNM <= 1.01 * (2.0**-8 * scale * true_BNM.abs() + 1e-5)).all()


@pytest.mark.parametrize("rows", [7, 96])
@pytest.mark.usefixtures("widened")
def test_packed_weights_of_bfloat16_are_widened_once(rows: int) -> None:
    x, weight_OI, bias_O = operands(torch.bfloat16, rows)
    layer = nn.Linear(FROM, TO, dtype=torch.bfloat16)
    layer.weight.data, layer.bias.data = weight_OI, bias_O
    install(layer)
    packed = PackedLinears(layer)
    packed.pack()
    with torch.no_grad(), packed.applied():
        assert torch.equal(layer(x), linear(x, weight_OI, bias_O))


def test_small_products_are_left_to_torch() -> None:
    weight_OI = torch.zeros(64, 64)
    assert cpu_linear.pays(LEAST_PRODUCTS // 64**2, weight_OI)
    assert not cpu_linear.pays(LEAST_PRODUCTS // 64**2 - 1, weight_OI)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 32, 96])
@pytest.mark.usefixtures("always")
def test_packed_weights_give_the_same_products_until_they_are_dropped(dtype: torch.dtype, rows: int) -> None:
    x, weight_OI, bias_O = operands(dtype, rows)
    layer = nn.Linear(FROM, TO, dtype=dtype)
    layer.weight.data, layer.bias.data = weight_OI.clone(), bias_O
    install(layer)
    packed = PackedLinears(layer)
    with torch.no_grad():
        plain = layer(x)
        packed.pack()
        layer.weight.zero_()  # the copy is another one
        with packed.applied():
            if rows > 1:
                assert torch.equal(layer(x), plain)
            # One row of float32 differs by its rounding, so that a widened one may be rounded to the number beside.
            step = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(layer(x), plain, rtol=step, atol=1e-5)
        assert torch.equal(layer(x), bias_O.expand(rows, TO)), "outside the weights themselves count"
        packed.drop()
        with packed.applied():
            assert torch.equal(layer(x), bias_O.expand(rows, TO))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float64_has_no_packed_weights_and_tied_ones_are_packed_once(dtype: str) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    exact = PackedLinears(model.module)
    exact.pack()
    assert exact.is_packed
    with torch.no_grad(), exact.applied():
        model.weights.zero_()
        assert not model.module.lm_head(torch.ones(1, 32, dtype=torch.float64)).any(), "there is no copy"
    module = from_module(tiny("llama"), tiny_tokenizer(), dtype).module
    module.extra = nn.Linear(32, 320, bias=False)
    module.extra.weight = module.lm_head.weight
    install(module)
    packed = PackedLinears(module)
    packed.pack()
    copies = [tensor for forward, tensor in packed._weights or () if forward.layer in (module.extra, module.lm_head)]
    assert len(copies) == 2
    assert copies[0] is copies[1]


@pytest.mark.usefixtures("always")
def test_copies_of_a_model_compute_with_their_own_weights() -> None:
    model = from_module(tiny("llama"), tiny_tokenizer(), "float32")
    twin = copy_of(model)
    deep = copy.deepcopy(model.module)
    for module in (twin.module, deep):
        layer = module.model.layers[0].mlp.up_proj
        assert vars(layer)["forward"].layer is layer
    with torch.no_grad():
        twin.weights.zero_()
        hidden = torch.ones(3, 32)
        assert twin.module.model.layers[0].mlp.up_proj(hidden).abs().max() == 0
        assert model.module.model.layers[0].mlp.up_proj(hidden).abs().max() > 0


@pytest.mark.usefixtures("always")
def test_an_adapter_lies_on_the_hooked_layer() -> None:
    model = from_module(tiny("llama"), tiny_tokenizer(), "float32")
    view = add_lora(model, LoraSettings(rank=2), name="actor", seed=0)
    assert view.own is not None
    layer = view.module.model.layers[0].mlp.up_proj
    assert vars(layer.base_layer)["forward"].layer is layer.base_layer
    with torch.no_grad():
        for name, param in view.own.parameters.items():
            param.fill_(0.1 if "up_proj" in name and "layers.0" in name else 0.0)
    view.backbone.activate("actor")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    a, b = (view.own.parameters[f"model.layers.0.mlp.up_proj.lora_{part}.weight"] for part in "AB")
    with torch.no_grad():
        expected = F.linear(x, layer.base_layer.weight) + (x @ a.t() @ b.t()) * layer.scaling["actor"]
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("always")
def test_a_rollout_packs_once_and_forgets_before_the_weights_change(dtype: str) -> None:
    """The tokens after an update are those of a fresh engine: nothing of the old weights is left."""
    model = from_module(tiny("llama"), tiny_tokenizer(), dtype)
    engine = Engine(model, SamplingSettings())
    sampling = Sampling(max_tokens=PACK_STEPS + 8, stop_token_ids=())

    def say(engine: Engine) -> list[tuple[int, ...]]:
        seen = []
        for uid in range(3):
            engine.add(Request(_prompt(uid, range(5, 9 + uid)), 2, sampling, NoiseKey(3)))
        samples = []
        while engine.has_work:
            samples += engine.step()
            seen.append(is_packed(engine))
        assert all(seen[:-1]), "from the first step on"
        assert not is_packed(engine)
        return [sample.token_ids for sample in sorted(samples, key=lambda s: (s.prompt.uid, s.index))]

    before = say(engine)
    assert before == say(Engine(model, SamplingSettings()))
    with torch.no_grad():
        model.weights.mul_(-1.5)
    engine.update_weights(1)
    after = say(engine)
    assert after != before
    assert after == say(Engine(model, SamplingSettings()))


def test_a_packed_rollout_says_what_an_unpacked_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2", dtype=torch.bfloat16)
    sampling = Sampling(max_tokens=24, stop_token_ids=())

    def say() -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        engine = Engine(model, SamplingSettings())
        engine.add(Request(_prompt(1, range(5, 12)), 3, sampling, NoiseKey(3)))
        return [(sample.token_ids, sample.logprobs) for sample in sorted(drain(engine), key=lambda s: s.index)]

    def refused(model: LanguageModel, block_tokens: int) -> CompiledForward:
        raise Refused("for the test")

    monkeypatch.setattr(CompiledForward, "of", refused)
    packed = say()
    monkeypatch.setattr(PackedLinears, "pack", lambda self: None)
    assert packed == say()


def test_short_responses_are_not_worth_a_packed_copy() -> None:
    engine = Engine(tiny_model("llama", dtype=torch.float32), SamplingSettings())
    engine.add(Request(_prompt(1, range(5, 12)), 3, Sampling(max_tokens=PACK_STEPS - 1), NoiseKey(3)))
    engine.step()
    assert engine.has_work
    assert not is_packed(engine)


@pytest.mark.parametrize("shape", [(N, FROM), (1, N, FROM), (4, N // 4, FROM)])
@pytest.mark.usefixtures("always")
def test_the_result_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    x, weight_OI, bias_O = operands(torch.float32)
    x, weight_OI = x.view(shape).requires_grad_(), weight_OI.requires_grad_()
    ones = torch.ones(*shape[:-1], TO)
    kept = linear(x, weight_OI, bias_O)
    expected = torch.autograd.grad(kept, [x, weight_OI], ones * (kept < 0.5))
    changed = linear(x, weight_OI, bias_O).clamp_(max=0.5)
    assert not kept._is_view()
    assert all(map(torch.equal, torch.autograd.grad(changed, [x, weight_OI], ones), expected))

"""The compiled forward of models that carry adapters, against the plain layers of peft."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.data.records import Prompt
from plait.generation import panels
from plait.generation.compiled_forward import CompiledForward
from plait.generation.dense_layers import Adapter, Projection, adapters_of
from plait.generation.engine import Engine, drain
from plait.generation.proof import prove
from plait.generation.ragged import NewTokens, ragged
from plait.generation.refused import Refused
from plait.generation.request import Request
from plait.generation.sampling import Sampling
from plait.generation.settings import SamplingSettings
from plait.kernels import decoder, paged_attention
from plait.kernels.noise import NoiseKey
from plait.kernels.paged_attention import KEYS
from plait.models.language_model import LanguageModel
from plait.models.lora import add_lora, without_lora
from plait.models.lora_settings import LoraSettings
from tests.cases import slow_but
from tests.generation.spoilt import change_weights
from tests.generation.test_compiled_forward import FAMILIES, compiled_of, module_logits, pool_of, tokens
from tests.models.test_lora import stirred
from tests.models.tiny import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = [
    pytest.mark.skipif(not all(map(paged_attention.fast, DTYPES)), reason="no numba, or a CPU without AVX2"),
]
pytest.importorskip("peft")

ATTENTION = ("q_proj", "v_proj")
SETTINGS = [
    LoraSettings(rank=1),
    LoraSettings(rank=3, alpha=5.0, target_modules=ATTENTION),
    LoraSettings(rank=40, target_modules=("k_proj", "o_proj", "up_proj")),
    LoraSettings(rank=12, target_modules=("down_proj",)),
]


def adapted(dtype: torch.dtype, settings: LoraSettings, family: str = "llama", seed: int = 0) -> LanguageModel:
    return stirred(add_lora(tiny_model(family, dtype=dtype), settings, name="actor", seed=0), seed)


def logits_of(compiled: CompiledForward, token_ids: list[int], counts: tuple[int, ...] = ()) -> Tensor:
    """In chunks of so many tokens, or all at once."""
    pool, found, at = pool_of(6), [], 0
    for count in counts or (len(token_ids),):
        batch = ragged([NewTokens(token_ids[at : at + count], at, [4, 0, 5, 1, 2])], KEYS)
        found.append(compiled.logits(compiled.hidden(batch, pool)))
        at += count
    return torch.cat(found)


def near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"rank {settings.rank}")
def test_chunks_and_decode_steps_give_the_logits_of_the_module(settings: LoraSettings) -> None:
    model = adapted(torch.float32, settings)
    found = logits_of(compiled_of(model), token_ids := tokens(70), (40, 1, 3, 1, 20, 1, 1, 3))
    near(found, module_logits(model, token_ids))
    assert (found - module_logits(without_lora(model), token_ids)).abs().max() > 1e-2


@pytest.mark.parametrize("family", slow_but(["qwen2", "phi3"], FAMILIES))
def test_of_every_family(family: str) -> None:
    """Phi3 has one projection for queries, keys and values, qwen2 biases."""
    model = adapted(torch.float32, LoraSettings(rank=4), family)
    near(logits_of(compiled_of(model), tokens(40)), module_logits(model, tokens(40)))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"rank {settings.rank}")
def test_bfloat16_is_as_near_to_float32_as_the_module_is(settings: LoraSettings) -> None:
    token_ids = tokens(40)
    model = adapted(torch.bfloat16, settings)
    ours = logits_of(compiled_of(model), token_ids).float()
    theirs = module_logits(model, token_ids)
    model.module.float()
    exact = module_logits(model, token_ids)
    mine, other = ((found - exact).square().mean().sqrt() for found in (ours, theirs))
    assert mine <= 1.15 * other, f"root mean square error {mine:.3g}, of the module {other:.3g}"


@pytest.mark.parametrize("by_unit", [False, True], ids=["vectors", "matrix unit"])
def test_what_an_adapter_adds_is_rounded_where_the_plain_layers_round(by_unit: bool) -> None:
    """Whole numbers, whose sums have no rounding, so that all bits are those of the plain layers."""
    generator = torch.Generator().manual_seed(0)
    x_CK, weight, low, high = (
        torch.randint(-3, 4, shape, generator=generator).bfloat16() for shape in ((5, 64), (70, 64), (3, 64), (70, 3))
    )
    plain = x_CK @ weight.t()
    expected = plain + (x_CK @ low.t()) @ high.t() * 1.3
    layer = torch.nn.Linear(64, 70, bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(weight)
    a, b = torch.nn.Linear(64, 3, bias=False), torch.nn.Linear(3, 70, bias=False)
    a.weight, b.weight = torch.nn.Parameter(low), torch.nn.Parameter(high)
    rows = adapters_of([Projection(layer, Adapter(a, b, 1.3))])
    assert [part.shape for row in rows for part, _ in row] == [(3, 64), (70, 32)]
    laid_out = panels.Panels().of([[(layer.weight, None)], *rows])
    room = {name: torch.zeros(5, 96, dtype=torch.bfloat16) for name in decoder.Room._fields}
    as_array = paged_attention.array_of
    out = torch.empty(5, 96, dtype=torch.bfloat16)
    adapter_3 = np.array([laid_out[1].data_ptr(), laid_out[2].data_ptr(), 32])
    decoder.project(
        as_array(x_CK),
        laid_out[0].data_ptr(),
        adapter_3,
        np.float32(1.3),
        (64, 70),
        as_array(out),
        decoder.Room(**{name: as_array(tensor) for name, tensor in room.items()}),
        5,
        by_unit and paged_attention.by_matrix_unit(torch.bfloat16),
        (0, 1, 0),
    )
    assert torch.equal(out[:, :70], expected)
    assert not torch.equal(expected, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_the_same_to_the_bit_in_every_chunking_and_on_every_number_of_threads(dtype: torch.dtype) -> None:
    compiled = compiled_of(adapted(dtype, LoraSettings(rank=5)))
    whole = logits_of(compiled, tokens(60))
    assert torch.equal(logits_of(compiled, tokens(60), (1, 7, 31, 2, 1, 18)), whole)
    before = torch.get_num_threads()
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(logits_of(compiled, tokens(60)), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fresh_adapter_changes_no_bit(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    before = logits_of(compiled_of(model), tokens(20))
    view = add_lora(model, LoraSettings(rank=4), name="actor", seed=1)
    assert torch.equal(logits_of(compiled_of(view), tokens(20)), before)


# --- several, and updates ----------------------------------------------------------------------------------------


def test_each_view_of_one_base_has_its_own_adapter_and_the_reference_none() -> None:
    base = tiny_model("llama", dtype=torch.float32)
    plain = logits_of(compiled_of(base), tokens(20))
    actor = stirred(add_lora(base, LoraSettings(rank=4), name="actor", seed=0), 1)
    critic = stirred(add_lora(base, LoraSettings(rank=7, target_modules=ATTENTION), name="critic", seed=0), 2)
    before = [view.trained.weights.clone() for view in (actor, critic)]
    forwards = [compiled_of(view) for view in (actor, critic, base)]
    for view, weights in zip((actor, critic), before, strict=True):
        assert torch.equal(view.trained.weights, weights), "the proof leaves adapters as they are"
        assert all(any(own is param for param in view.module.parameters()) for own in view.own.parameters.values())
    found = [logits_of(compiled, tokens(20)) for compiled in forwards]
    for logits, view in zip(found, (actor, critic, base), strict=True):
        near(logits, module_logits(view, tokens(20)))
    assert torch.equal(found[2], plain)
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("keep_memory", [False, True])
def test_after_an_update_the_adapter_alone_is_laid_out_where_memory_is_kept(keep_memory: bool) -> None:
    model = adapted(torch.float32, LoraSettings(rank=4))
    compiled = compiled_of(model)
    logits_of(compiled, tokens(20))
    stirred(model, seed=5)
    compiled.drop(keep_memory=keep_memory)
    with mock.patch.object(panels, "lay_out", wraps=panels.lay_out) as lay_out:
        found = logits_of(compiled, tokens(20))
    near(found, module_logits(model, tokens(20)))
    of_adapters = 2 * 4 * 2  # A and B of four products in two layers
    assert lay_out.call_count == of_adapters + (0 if keep_memory else 4 * 2 + 1)


def test_weights_under_an_adapter_that_did_change_are_laid_out_again() -> None:
    model = adapted(torch.float32, LoraSettings(rank=4))
    compiled = compiled_of(model)
    logits_of(compiled, tokens(20))
    with torch.no_grad():
        model.weights.mul_(0.9)
    compiled.drop(keep_memory=True)
    near(logits_of(compiled, tokens(20)), module_logits(model, tokens(20)))


def test_an_engine_draws_by_it_what_training_computes() -> None:
    model = adapted(torch.float32, LoraSettings(rank=4))
    engine = Engine(model, SamplingSettings(max_running=4))
    assert engine.state.forward.refusals.compiled is None
    for seed in (3, 4):  # weights change in between
        engine.add(Request(Prompt(0, "", (5, 6, 7)), 3, Sampling(max_tokens=24, stop_token_ids=()), NoiseKey(0, 0)))
        for sample in drain(engine):
            said = [5, 6, 7, *sample.token_ids]
            logprobs = module_logits(model, said).log_softmax(-1)[2:-1]
            expected = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-4)
        stirred(model, seed)
        engine.update_weights(seed)


# --- what is refused ---------------------------------------------------------------------------------------------


def other_scale(compiled: CompiledForward) -> None:
    compiled.settings.adapter_scale *= 1.02


def lost_product(compiled: CompiledForward) -> None:
    change(compiled, lambda table: table[:, 1].fill(0))


def other_layer(compiled: CompiledForward) -> None:
    change(compiled, lambda table: table[:, 3].__setitem__(0, table[1, 3]))


def change(compiled: CompiledForward, how: Callable[[np.ndarray], None]) -> None:
    def adapters(compiled: CompiledForward) -> None:
        assert compiled.weights is not None
        how(compiled.weights.adapters_L43)

    change_weights(compiled, adapters)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sabotage", [other_scale, lost_product, other_layer], ids=lambda sabotage: sabotage.__name__)
def test_the_proof_finds_an_error_in_an_adapter_though_a_fresh_one_adds_nothing(
    sabotage: Callable[[CompiledForward], None], dtype: torch.dtype
) -> None:
    view = add_lora(tiny_model("llama", dtype=dtype), LoraSettings(rank=4), name="actor", seed=0)
    prove(CompiledForward(view))
    wrong = CompiledForward(view)
    sabotage(wrong)
    with pytest.raises(Refused, match="its compiled layer 0 differs"):
        prove(wrong)
    assert not any(view.own.parameters[name].any() for name in view.own.parameters if "lora_B" in name)


def test_adapters_of_another_form_are_refused() -> None:
    model = adapted(torch.float32, LoraSettings(rank=4))
    layers = model.module.model.layers
    layers[1].mlp.up_proj.scaling["actor"] = 7.0
    with pytest.raises(Refused, match=r"^its adapters have several scales$"):
        CompiledForward.of(model)
    layers[1].mlp.up_proj.scaling["actor"] = 2.0
    layers[0].self_attn.q_proj.lora_B["actor"].bias = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(Refused, match=r"^its layers have further weights$"):
        CompiledForward.of(model)

"""Packed rows with shared prompts compute what Transformers computes for every sample by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data.packed import pack
from plait.models.backbone_model import copy_of
from plait.models.compute.attention import PackedContext
from plait.models.language_loading import from_module
from tests.cases import examples, slow_but
from tests.models.oracle import RAGGED, eager_logprobs, gradients, largest_error
from tests.models.tiny import FAMILIES, RECURRENT, tiny, tiny_llama, tiny_model


@pytest.mark.parametrize("family", slow_but([*list(FAMILIES)[::2], *list(RECURRENT)[::2]], {**FAMILIES, **RECURRENT}))
def test_logprobs_and_gradients_equal_the_eager_unpacked_ones(family: str) -> None:
    module, model = tiny(family), tiny_model(family)
    expected = eager_logprobs(module, RAGGED, temperature=0.7)
    got = model.logprobs(pack(RAGGED), temperature=0.7)
    assert got[0].dtype == torch.float64
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-6)
    assert largest_error(gradients(model.module, *got), gradients(module, *expected)) < 1e-6


@pytest.mark.parametrize("family", slow_but(["bamba"], RECURRENT))
def test_responses_of_one_token_have_gradients(family: str) -> None:
    """Families' code for one token writes over the state that it goes on from."""
    groups = [([5, 6, 7, 8], [[9], [10]]), ([11], [[12], [13], [14]])]
    module, model = tiny(family), tiny_model(family)
    expected, got = eager_logprobs(module, groups), model.logprobs(pack(groups), 1.0)
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-9)
    assert largest_error(gradients(model.module, *got), gradients(module, *expected)) < 1e-9


def test_the_window_of_a_response_counts_prompt_positions() -> None:
    """With a window of 5 the answer differs from full attention, and still equals the eager one."""
    groups = [(list(range(3, 12)), [list(range(20, 33)), [40]])]
    windowed, full = tiny_model("mistral"), tiny_model("mistral", sliding_window=None)
    got, _ = windowed.logprobs(pack(groups), 1.0)
    torch.testing.assert_close(got, eager_logprobs(tiny("mistral"), groups)[0], rtol=0, atol=1e-6)
    assert (got - full.logprobs(pack(groups), 1.0)[0]).abs().max() > 1e-2


def test_siblings_do_not_see_each_other() -> None:
    model = tiny_llama()
    together, _ = model.logprobs(pack([([5, 6], [[7, 8, 9], [10, 11]])]), 1.0)
    alone, _ = model.logprobs(pack([([5, 6], [[7, 8, 9]])]), 1.0)
    torch.testing.assert_close(together[:3], alone, rtol=0, atol=1e-12)


def test_temperature_divides_the_logits() -> None:
    model = tiny_llama()
    hot, _ = model.logprobs(pack(RAGGED), 2.0)
    torch.testing.assert_close(hot, eager_logprobs(tiny("llama"), RAGGED, 2.0)[0], rtol=0, atol=1e-6)
    assert (hot - model.logprobs(pack(RAGGED), 1.0)[0]).abs().max() > 0.1


@pytest.mark.parametrize(
    "family",
    slow_but(
        ["gemma2", "qwen3_5_text"], ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_5_text", "lfm2", "bamba"]
    ),
)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-4), (torch.bfloat16, 0.15)])
def test_narrow_dtypes_stay_near_float64(family: str, dtype: torch.dtype, allowed: float) -> None:
    """The same weights: those of the narrow model, widened. Drawn smaller, since wide ones amplify every rounding."""
    narrow = tiny(family, dtype=dtype, weight_scale=0.05)
    wide = tiny(family, weight_scale=0.05)
    wide.load_state_dict(narrow.state_dict())
    model = from_module(narrow, None, dtype=str(dtype).removeprefix("torch."))
    got, entropies = model.logprobs(pack(RAGGED), 0.7)
    expected, expected_entropies = eager_logprobs(wide, RAGGED, 0.7)
    assert got.dtype == torch.float32
    assert (got.double() - expected).abs().max() < allowed
    assert (entropies.double() - expected_entropies).abs().max() < allowed


shapes = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 14), min_size=0, max_size=4)), min_size=1, max_size=4
)
FAMILY_OF_SHAPES = {
    family: tiny_model(family) for family in ("llama", "gemma2", "gpt_oss", "qwen3_5_text", "lfm2", "bamba")
}


@settings(max_examples=examples(16, 40), deadline=None)
@given(shapes, st.sampled_from(sorted(FAMILY_OF_SHAPES)), st.integers(0, 1000))
def test_any_ragged_shape_equals_the_samples_one_by_one(shape: list, family: str, seed: int) -> None:
    """Groups of any shape, empty responses and prompts without any response among them."""
    model = FAMILY_OF_SHAPES[family]
    ids = iter(torch.randint(3, 300, (400,), generator=torch.Generator().manual_seed(seed)).tolist())
    groups = [([next(ids) for _ in range(p)], [[next(ids) for _ in range(r)] for r in lengths]) for p, lengths in shape]
    with torch.no_grad():
        batch = pack(groups)
        got = model.hidden(batch.token_ids_T, batch.position_ids_T, PackedContext(batch))
        for (prompt, responses), group in zip(groups, batch.groups, strict=True):
            for response, span in zip(responses or [()], group.responses or [group.prompt], strict=True):
                single = pack([([*prompt, *response], [])])
                alone = model.hidden(single.token_ids_T, single.position_ids_T, PackedContext(single))
                torch.testing.assert_close(got[group.prompt.start : group.prompt.stop], alone[: len(prompt)])
                if responses:
                    torch.testing.assert_close(got[span.start : span.stop], alone[len(prompt) :])


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "lfm2", "bamba"])
def test_activation_checkpointing_changes_no_gradient(family: str) -> None:
    model, batch = tiny_model(family), pack(RAGGED)
    plain = gradients(model.module, *model.logprobs(batch, 1.0))
    again = gradients(model.module, *model.logprobs(batch, 1.0, checkpoint=True))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_activation_checkpointing_saves_activations() -> None:
    """Counted in bytes that autograd keeps: with checkpointing, more layers cost one hidden state each."""
    batch = pack([(list(range(3, 60)), [list(range(100, 160))] * 4)])
    kept: dict[bool, dict[int, int]] = {True: {}, False: {}}
    for layers in (2, 4):
        model = tiny_model("llama", num_hidden_layers=layers, layer_types=None)
        for checkpoint in kept:
            total = 0

            def count(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal total
                total += tensor.numel() * tensor.itemsize
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                model.logprobs(batch, 1.0, checkpoint=checkpoint)
            kept[checkpoint][layers] = total
    per_layer = {checkpoint: (totals[4] - totals[2]) / 2 for checkpoint, totals in kept.items()}
    assert per_layer[True] < per_layer[False] / 10


def test_no_graph_is_built_without_grad() -> None:
    model = tiny_llama()
    with torch.no_grad():
        logprobs, entropies = model.logprobs(pack(RAGGED), 1.0, checkpoint=True)
    assert logprobs.grad_fn is None
    assert entropies.grad_fn is None


def test_a_frozen_copy_has_its_own_weights_and_no_gradients() -> None:
    model = tiny_llama()
    frozen = copy_of(model)
    before, _ = frozen.logprobs(pack(RAGGED), 1.0)
    with torch.no_grad():
        model.weights.mul_(0.5)
    after, _ = frozen.logprobs(pack(RAGGED), 1.0)
    assert torch.equal(before, after)
    assert not before.requires_grad
    assert not any(param.requires_grad for param in frozen.module.parameters())
    assert frozen.eos_token_ids == model.eos_token_ids


def test_a_batch_without_responses_has_no_logprobs() -> None:
    logprobs, entropies = tiny_llama().logprobs(pack([([5, 6, 7], [])]), 1.0)
    assert logprobs.shape == entropies.shape == (0,)


def test_kv_sink_receives_every_layer() -> None:
    model, batch = tiny_llama(), pack([([5, 6, 7], []), ([8, 9], [])])
    seen: dict[int, tuple[torch.Size, torch.Size]] = {}
    context = PackedContext(batch, lambda layer, key, value: seen.update({layer: (key.shape, value.shape)}))
    model.hidden(batch.token_ids_T, batch.position_ids_T, context)
    assert seen == {layer: (torch.Size([2, 5, 8]), torch.Size([2, 5, 8])) for layer in range(2)}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_cuda_equals_the_cpu_oracle(family: str) -> None:
    module, model = tiny(family), tiny_model(family, device="cuda")
    expected = eager_logprobs(module, RAGGED)
    got = model.logprobs(pack(RAGGED, device="cuda"), 1.0)
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=0, atol=1e-6)
    theirs = gradients(module, *expected)
    ours = {name: grad.cpu() for name, grad in gradients(model.module, *got).items()}
    assert largest_error(ours, theirs) < 1e-6

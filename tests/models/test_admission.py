"""What is refused, by which check, and with which measurement; what is left untouched."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.errors import ModelError
from plait.models import admission
from plait.models.compute import cpu_linear, row_attention
from plait.models.language_loading import from_module, load_model
from plait.models.shape import ModelShape
from tests.cases import slow_but
from tests.models.tiny import FAMILIES, MOE, RECURRENT, save_tiny, self_check_once, tiny, tiny_model, tiny_with_images
from tests.models.wrong import attend_wrongly

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "inkling_text": ("backend flag", MOE),
    "jamba": (  # Mamba-1
        r"self-check: what `model\.layers\.0\.mamba` makes of several tokens does not begin with the state that it ",
        {**MOE, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "falcon_mamba": ("layer types: none of its 2 layers is an attention layer", {}),
    "mamba2": ("layer types: none of its 2 layers is an attention layer", {"num_heads": 4, "head_dim": 16}),
    "zamba2": (
        r"self-check: attention ran for layers \[-1\], expected each of \[1\] once",
        {"n_mamba_heads": 4, "layers_block_type": ["linear_attention", "hybrid"]},
    ),
    "minimax": (
        r"self-check: segments went through the recurrent layers \[\], expected each of \[0\] once",
        {**MOE, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "llama4_text": (
        "layer types: 1 of 2 layers are chunked_attention",
        {**MOE, "intermediate_size_mlp": 48, "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "hrm_text": (r"self-check: attention ran for layers \[0, 0, ", {}),
    "diffllama": (r"self-check: attention ran for layers \[0, 0, 1, 1\], expected each of 0 … 1 once", {}),
    "nemotron": ("self-check: it does not get the keyword arguments", {}),
    "doge": ("self-check: it adds a mask or bias of its own", {}),
    "opt": ("its head cannot be run without its decoder", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_would_be_wrong_are_refused(family: str) -> None:
    check, overrides = REFUSED[family]
    module = tiny(family, dtype=torch.float32, **overrides)
    with pytest.raises(ModelError, match=rf"^model: .*{check}.*Set `model`"):
        from_module(module, None, "float32")


ADMITTED = list(itertools.product({**FAMILIES, **RECURRENT}, ("float32", "bfloat16")))


# Of every third family one width, by turns.
@pytest.mark.parametrize(("family", "dtype"), slow_but([*ADMITTED[::12], *ADMITTED[7::12]], ADMITTED))
def test_the_others_are_admitted_in_every_dtype(family: str, dtype: str) -> None:
    module = tiny(family, dtype=getattr(torch, dtype), weight_scale=0.05)
    assert from_module(module, None, dtype).dtype == getattr(torch, dtype)


def test_a_wrong_attention_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are shifted by one token: only numbers tell."""
    model = tiny_model("llama", dtype=torch.float32)
    assert admission.self_check(model, "it") < 1e-5
    attend_wrongly(monkeypatch)
    with pytest.raises(ModelError, match=r"differ from the eager forward by \d\.\d+ of their size, allowed 0\.001"):
        admission.self_check(model, "it")


KINDS = ["sliding_attention", "full_attention"]
IN_PLACE: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 320,
        "laurel_rank": 8,
        "layer_types": KINDS * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "roc_bert": {"is_decoder": True, "pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "olmo": {"clip_qkv": 0.5},
}
"""Families that change what a linear layer gave back."""


@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("family", IN_PLACE)
def test_families_that_change_tensors_in_place_train(family: str, dtype: str) -> None:
    model = from_module(tiny(family, dtype=getattr(torch, dtype), weight_scale=0.05, **IN_PLACE[family]), None, dtype)
    batch, _ = admission.check_batch(model.module, model.device)
    with cpu_linear.everywhere():
        logprobs_R, _ = model.logprobs(batch, 1.0)
    logprobs_R.sum().backward()
    assert sum(param.grad is not None for param in model.module.parameters()) > 10


def test_a_checkpoint_that_states_one_width_for_each_layer_is_read_again(tmp_path: Path) -> None:
    two = {"num_hidden_layers": 2, "layer_types": KINDS, "activation_sparsity_pattern": [0.0] * 2}
    save_tiny(tmp_path / "it", family="gemma3n_text", weight_scale=0.05, **{**IN_PLACE["gemma3n_text"], **two})
    assert json.loads((tmp_path / "it/config.json").read_text())["intermediate_size"] == [48] * 2
    again = load_model(str(tmp_path / "it"), dtype="float32")
    assert ModelShape.from_config(again.config.to_dict()).intermediate == 48


def test_a_training_forward_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "unviewed", torch.Tensor.view)  # no family could change it in place
    module = tiny("olmo", dtype=torch.float32, weight_scale=0.05, clip_qkv=0.5)
    with pytest.raises(ModelError, match="self-check: its training forward or backward raised RuntimeError: Output 0"):
        from_module(module, None, "float32")


def test_a_wrong_gradient_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys without a gradient: the forward is right."""
    attend = admission.PackedContext.attend

    def detached(self, layer, query, key, value, form):
        return attend(self, layer, query, key.detach(), value, form)

    model = tiny_model("llama", dtype=torch.float32)
    before = [param.requires_grad for param in model.module.parameters()]
    monkeypatch.setattr(admission.PackedContext, "attend", detached)
    with pytest.raises(ModelError, match=r"gradient of .* differs from the eager one by .*, allowed 0\.01"):
        admission.self_check(model, "it")
    assert [param.requires_grad for param in model.module.parameters()] == before
    assert all(param.grad is None for param in model.module.parameters())


def test_what_counts_as_out_of_reach_of_texts_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    from_module(tiny_with_images(), None)
    module = tiny_with_images()
    norm = module.get_decoder().norm.weight
    monkeypatch.setattr(admission, "unreached", lambda module: [norm])
    with pytest.raises(ModelError, match="check of its self-check: texts reach weights outside its decoder of texts"):
        from_module(module, None)


def test_gradients_are_compared_of_a_bounded_number_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny("llama", dtype=torch.float32)
    assert set(admission.compared_parameters(module)) == {name for name, _ in module.named_parameters()}
    monkeypatch.setattr(admission, "COMPARED_ELEMENTS", 33 * 5)
    compared = admission.compared_parameters(module)
    assert all(name.endswith("norm.weight") for name in compared)
    assert len(compared) == 5  # of 32 elements each; the two matrices of 16 x 32 for keys do not fit


def test_a_window_that_is_not_the_stated_one_is_noticed() -> None:
    """The few tokens of the check lie within both windows, so that the logits agree."""
    model = tiny_model("gemma2", sliding_window=200)
    model.config.sliding_window = 100
    with pytest.raises(ModelError, match="layer 0 attends with window 200, its configuration states 100"):
        admission.self_check(model, "it")


def test_no_kernel_is_compiled_to_admit_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose kernel of training is proven when it is first used."""
    monkeypatch.setattr(row_attention, "has_kernel", lambda kind: True)
    monkeypatch.setattr(row_attention, "is_proven", lambda *of: pytest.fail("it is compiled"))
    from_module(tiny("llama", dtype=torch.float32), None, "float32")


def test_an_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"float32, bfloat16, float64.*'fp8'"):
        from_module(tiny(), None, "fp8")


def test_no_random_state_is_read_or_moved() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = admission.self_check(tiny_model(), "it")
    torch.testing.assert_close(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
    torch.manual_seed(2)
    assert admission.self_check(tiny_model(), "it") == first


def test_tests_check_the_same_weights_once_and_remember_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    model = tiny_model()

    def check(model: Any, name: str) -> float:
        asked.append(name)
        if name == "wrong":
            raise ModelError(name)
        return 0.125

    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path))
    monkeypatch.setattr(admission, "self_check", check)
    another = self_check_once()
    for _ in range(2):
        with pytest.raises(ModelError, match="wrong"):
            self_check_once()(model, "wrong")
    assert [self_check_once()(model, "first"), another(model, "again")] == [0.125, 0.125]
    model.weights[0] += 1
    assert another(model, "changed") == 0.125
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "other" / "cache"))
    assert another(model, "elsewhere") == 0.125, "the cache that it was made with may be gone"
    assert asked == ["wrong", "wrong", "first", "changed", "elsewhere"]


def test_the_module_is_left_with_our_attention_and_without_gradients() -> None:
    model = tiny_model()
    assert model.config._attn_implementation == "plait"
    assert not model.module.training
    assert all(param.grad is None for param in model.module.parameters())

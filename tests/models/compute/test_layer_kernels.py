"""Norms, gates and rotations of packed rows by kernels: by stand-ins that compute what kernels compute, and by Triton's
programs on a GPU where there is one, else by Triton's interpreter where it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.data.packed import pack
from plait.kernels import device_rotation, device_rows
from plait.models.compute import row_kernel_proof
from plait.models.compute.attention import PackedContext
from plait.models.compute.layer_kernels import LayerKernels
from plait.models.compute.row_attention import pieces_plan
from plait.models.compute.row_kernel_proof import is_proven
from plait.models.language_model import LanguageModel
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from tests import warm
from tests.kernels.interpreted_liger import interpret_liger
from tests.kernels.row_stand_in import NAMES, Calls, StandIn, stand_in
from tests.models.oracle import RAGGED, eager_logprobs, gradients, largest_error
from tests.models.tiny import tiny, tiny_model

HAS_LIGER = importlib.util.find_spec("triton") is not None and importlib.util.find_spec("liger_kernel") is not None


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Names of what stand-ins computed, on a CPU."""
    calls: Calls = []
    stand_in(monkeypatch, StandIn(), calls)
    is_proven.cache_clear()
    yield calls
    is_proven.cache_clear()


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as without:
        for module in (device_rows, device_rotation):
            without.setattr(module, "serves", lambda device: False)
        yield


def a_model(family: str = "llama", dtype: torch.dtype = torch.float32, device: str = "cpu") -> LanguageModel:
    """As a model on a GPU is: no layer computes in a CPU's way."""
    with without_kernels():
        model = tiny_model(family, dtype=dtype, device=device)
    for part in model.module.modules():
        vars(part).pop("forward", None)
    return model


Found = tuple[Tensor, dict[str, Tensor]]


def trained(model: LanguageModel, *, checkpoint: bool = False) -> Found:
    """Log-probs of a packed row, and gradients by name."""
    found = model.logprobs(pack(RAGGED, device=model.device), 0.7, checkpoint=checkpoint)
    logprobs, entropies = (numbers.cpu() for numbers in found)
    return logprobs.detach(), {n: g.cpu() for n, g in gradients(model.module, logprobs, entropies).items()}


def plainly(model: LanguageModel, **how: Any) -> Found:
    """The same by the family's own operators."""
    with without_kernels():
        return trained(model, **how)


def compare(found: Found, expected: Found) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=2e-5, rtol=1e-5)
    assert largest_error(found[1], expected[1]) < 1e-5


@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_they_compute_what_the_family_computes(family: str, checkpoint: bool, computed: Calls) -> None:
    model = a_model(family)
    expected = plainly(model, checkpoint=checkpoint)
    assert not computed
    trained(model)  # proves the kernels
    computed.clear()
    compare(trained(model, checkpoint=checkpoint), expected)
    norms, others = sum("norm" in name for name in expected[1]), 0 if family == "gpt_oss" else 2
    # Computed again are the layers; the norm behind them is not.
    assert computed.count("normalised") == (2 * norms - 1 if checkpoint else norms)
    assert computed.count("normalised_backward") == norms
    assert sum(name.startswith("gated") and "backward" in name for name in computed) == others
    assert computed.count("rotated") == (2 * others if checkpoint else others), "queries and keys at once"
    assert computed.count("rotated_backward") == others
    assert not any("forward" in vars(part) for part in model.module.modules()), "they have their own again"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_scoring_says_the_bits_of_training(family: str, computed: Calls) -> None:
    model = a_model(family, torch.bfloat16)
    logprobs = trained(model)[0]
    computed.clear()
    with torch.no_grad():
        assert model.logprobs(pack(RAGGED), 0.7)[0].equal(logprobs)
    assert {"normalised", "rotated"} <= set(computed)
    assert not any("backward" in name for name in computed)


def test_adapters_are_computed_with_them(computed: Calls) -> None:
    pytest.importorskip("peft")
    view = add_lora(a_model(), LoraSettings(rank=3), name="actor", seed=0)
    found = trained(view, checkpoint=True)
    assert {"normalised", "gated_silu_backward_", "rotated_backward"} <= set(computed)
    compare(found, plainly(view, checkpoint=True))


def test_rows_that_are_not_packed_and_rows_in_pieces_are_the_families_own(computed: Calls) -> None:
    model, batch = a_model(), pack(RAGGED)

    class Elsewhere:
        """As generation's."""

        def __init__(self) -> None:
            self.attend = PackedContext(batch, planned=pieces_plan).attend

    for context in (PackedContext(batch, planned=pieces_plan), Elsewhere()):
        model.hidden(batch.token_ids_T, batch.position_ids_T, context)
        assert computed == []
    model.hidden(batch.token_ids_T, batch.position_ids_T, PackedContext(batch))
    assert computed != []


def test_a_compiled_layer_is_not_compiled_again(computed: Calls) -> None:
    """Generation's layers are compiled once, and training comes in between."""
    model, graphs = a_model(), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layer, x = model.module.model.layers[0], torch.randn(1, 5, 32)
    places = model.module.model.rotary_emb(x, torch.arange(5)[None])

    class Context:
        def attend(self, layer: int, query: Tensor, *given: Any) -> Tensor:
            return query.transpose(0, 1)

    def computes(x: Tensor) -> Tensor:
        return layer.mlp(layer.self_attn(layer.input_layernorm(x), places, None, context=Context())[0])

    compiled = torch.compile(computes, backend=backend, fullgraph=True)
    with torch.no_grad():
        before = compiled(x)
        trained_once = model.logprobs(pack(RAGGED), 0.7)
        assert trained_once[0].isfinite().all()
        assert computed != []
        assert compiled(x).equal(before)
    assert len(graphs) == 1


@pytest.mark.parametrize("wrong", [{"factor": 1.01}, {"slope": 1.1}, {"slope": float("nan")}], ids=str)
def test_kernels_that_say_something_else_are_not_used(
    wrong: dict[str, float], computed: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    stand_in(monkeypatch, StandIn(**wrong), computed)
    model = a_model()
    expected = plainly(model)
    for _ in range(2):
        found = trained(model)
        assert found[0].equal(expected[0])
        assert all(found[1][name].equal(grad) for name, grad in expected[1].items())
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split()[1] for line in lines) == ["gates", "norms", "rotations"]
    assert all(line.endswith("say: torch's operators compute them") for line in lines)


def test_kernels_that_raise_are_not_used(
    computed: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def broken(*given: Any, **named: Any) -> Any:
        raise RuntimeError("no such instruction\nat line 3")

    for name, module in NAMES.items():
        monkeypatch.setattr(module, name, broken)
    model = a_model()
    assert trained(model)[0].equal(plainly(model)[0])
    rotations, norms, gates = sorted(capsys.readouterr().err.splitlines(), reverse=True)
    why = "by one kernel cannot be compiled here (RuntimeError: no such instruction): torch's operators compute them"
    assert norms == f"plait: norms of 32 numbers {why}"
    assert gates == f"plait: gates of 48 numbers {why}"
    assert rotations == f"plait: rotations of 8 numbers {why}"


def test_what_a_gate_writes_over_is_not_read_again(computed: Calls) -> None:
    """By another node that kept it, or in a second backward."""
    model = a_model()
    mlp, x = model.module.model.layers[0].mlp, torch.randn(1, 5, 32)
    with LayerKernels(mlp).applied(torch.device("cpu")):
        out = mlp(x)
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_LIGER, reason="no CUDA device, or no liger-kernel")
@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_cuda_equals_the_cpu_oracle(family: str, checkpoint: bool, capsys: pytest.CaptureFixture) -> None:
    """In float32, with kernels and without; the kernels are used."""
    narrow = {"dtype": torch.float32, "weight_scale": 0.05}
    module, model = tiny(family, **narrow), tiny_model(family, device="cuda", **narrow)
    oracle = eager_logprobs(module, RAGGED, 0.7)
    expected = oracle[0].detach(), gradients(module, *oracle)
    for found in (trained(model, checkpoint=checkpoint), plainly(model, checkpoint=checkpoint)):
        torch.testing.assert_close(found[0], expected[0], atol=2e-4, rtol=1e-4)
        assert largest_error(found[1], expected[1]) < 1e-3
    assert "by one kernel" not in capsys.readouterr().err


@pytest.mark.skipif(not HAS_LIGER or warm.HAS_GPU, reason="triton or liger-kernel is not installed, or there is a GPU")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_triton_computes_what_the_family_computes(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """By Triton's interpreter."""
    interpret_liger(monkeypatch)
    for module in (device_rows, device_rotation):
        monkeypatch.setattr(module, "serves", lambda device: device.type == "cpu")
    monkeypatch.setattr(row_kernel_proof, "PROOF_ROWS", 7)
    is_proven.cache_clear()
    model = a_model(family)
    try:
        compare(trained(model), plainly(model))
        assert is_proven.cache_info().currsize >= 3
    finally:
        is_proven.cache_clear()
    assert capsys.readouterr().err == ""

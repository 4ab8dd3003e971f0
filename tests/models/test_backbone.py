"""The last layer's MLP computes the rows that are read, and no result changes by it."""

from __future__ import annotations

import pytest
import torch

from plait.data.packed import PackedBatch, pack
from plait.errors import ModelError
from plait.models import backbone
from plait.models.language_model import LanguageModel
from plait.models.scalar_loading import scalar_of
from plait.training.trainer import Trainer
from plait.training.trainer_settings import ExecutionSettings, SampleSettings
from tests.models.tiny import tiny_model

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe")


def a_batch() -> PackedBatch:
    ids = iter(range(5, 300))
    groups = [(17, (4, 0, 6)), (9, (5,)), (12, ())]
    return pack([([next(ids) for _ in range(p)], [[next(ids) for _ in range(r)] for r in rs]) for p, rs in groups])


def seen_rows(model: LanguageModel) -> list[int]:
    """Rows that the last MLP gets, call by call from now on."""
    seen: list[int] = []
    first = next(module for module in model.backbone.last_mlp.modules() if isinstance(module, torch.nn.Linear))
    first.register_forward_pre_hook(lambda layer, args: seen.append(args[0].shape[-2]))
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_all_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family, dtype=torch.float32)
    assert model.backbone.last_mlp is not None
    batch = a_batch()
    model.module.requires_grad_(True)

    def run() -> list[torch.Tensor]:
        model.module.zero_grad()
        logprobs, entropies = model.logprobs(batch, 1.0)
        (logprobs * torch.linspace(-1, 1, len(logprobs)) + entropies).sum().backward()
        grads = [param.grad for param in model.module.parameters() if param.grad is not None]
        return [logprobs.detach(), entropies.detach(), *grads]

    part = run()
    monkeypatch.setattr(backbone, "READ_SHARE", 0.0)
    for ours, all_rows in zip(part, run(), strict=True):
        torch.testing.assert_close(ours, all_rows, rtol=1e-4, atol=1e-5)


def test_only_rows_that_are_read_reach_the_last_mlp() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    batch = a_batch()
    rows = len(set(batch.predict_R.tolist()))
    seen = seen_rows(model)
    before = vars(model.backbone.last_mlp).get("forward")
    model.logprobs(batch, 1.0)
    model.logprobs(batch, 1.0, checkpoint=True)
    assert seen == [rows, batch.num_tokens]
    assert vars(model.backbone.last_mlp).get("forward") is before


def test_values_and_scores_are_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = scalar_of(tiny_model("llama", dtype=torch.float32), seed=0, head_std=1.0)
    part = model.values_and_scores(a_batch())
    monkeypatch.setattr(backbone, "READ_SHARE", 0.0)
    for ours, all_rows in zip(part, model.values_and_scores(a_batch()), strict=True):
        torch.testing.assert_close(ours, all_rows, rtol=1e-5, atol=1e-6)


def test_an_mlp_that_mixes_rows_is_left_alone() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    decoder = model.module.base_model
    mlp = decoder.layers[-1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x).cumsum(1)
    assert backbone.Backbone(decoder).last_mlp is None
    mlp.forward = lambda x: (forward(x), None)
    assert backbone.Backbone(decoder).last_mlp is None


def test_float64_computes_every_row() -> None:
    assert tiny_model("llama").backbone.last_mlp is None


def test_a_family_that_does_not_mark_its_layers_is_checkpointed_all_the_same() -> None:
    model = tiny_model("ctrl", n_embd=32, dff=48, n_layer=2, n_head=4, n_positions=256)
    grads = []
    for checkpoint in (False, True):
        sum(model.logprobs(a_batch(), 1.0, checkpoint=checkpoint)).sum().backward()
        grads.append({name: param.grad.clone() for name, param in model.module.named_parameters()})
        model.module.zero_grad()
    assert [type(layer).__name__ for layer in model.backbone.recomputed_layers()] == ["EncoderLayer"] * 2
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)


def test_layers_that_cannot_be_found_are_refused_before_the_first_step() -> None:
    model = tiny_model("ctrl", n_embd=32, dff=48, n_layer=2, n_head=4, n_positions=256)
    model.module.base_model.others = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    expected = "^checkpoint_activations: CTRLModel neither marks .* one list of 2 modules, but 2; set .* to false"
    with pytest.raises(ModelError, match=expected):
        Trainer(model, ExecutionSettings(64, checkpoint_activations=True), SampleSettings(1.0))

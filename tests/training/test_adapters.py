"""Training adapters: gradients against the merged model, buffers of the adapter alone, roles that share a backbone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from plait.data.rows import Rows
from plait.dataflow import Score
from plait.models.language_model import LanguageModel
from plait.models.lora import add_lora, without_lora
from plait.models.lora_settings import LoraSettings
from plait.models.scalar_loading import scalar_view
from plait.models.scalar_model import ScalarModel
from plait.training.memory import parameter_bytes
from plait.training.trainer import Trainer
from tests.cases import slow_but
from tests.models.tiny import tiny, tiny_llama
from tests.training.batches import ADVANTAGES, make_trainer, random_rows, run_all, scorer, train
from tests.training.exact import ExactFloat64
from tests.training.padded import padded

pytest.importorskip("peft")

TEMPERATURE = 0.7
SETTINGS = LoraSettings(rank=3, alpha=5.0)
SCALE = 5 / 3


def adapted(model: LanguageModel, name: str = "actor") -> LanguageModel:
    """With an adapter that is no longer at its start, where B is 0 and A has no gradient."""
    view = add_lora(model, SETTINGS, name=name, seed=0)
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(view.trained.weights.shape, generator=generator, dtype=torch.float64)
    view.trained.weights.add_((0.1 * noise).to(view.dtype))
    return view


def policy_loss(batch: Any, advantages: Tensor) -> Tensor:
    return batch.aggregate(-advantages * batch.logprobs, "token-mean")


def value_loss(batch: Any) -> Tensor:
    return batch.aggregate((batch.values - 1) ** 2, "token-mean")


def stepped(trainer: Trainer, rows: Rows, step: int = 0) -> dict[str, float]:
    scalar = isinstance(trainer.model, ScalarModel)
    loss, columns = (value_loss, {}) if scalar else (policy_loss, {"advantages": ADVANTAGES})
    return run_all(train(trainer, rows, columns, loss, step=step))[1]


def test_gradients_equal_those_through_the_merged_weights():
    """With W' = W + scale · B A written out, and nothing of peft."""
    rows = random_rows()
    view = adapted(tiny_llama(torch.float64))
    trainer = make_trainer(view, temperature=TEMPERATURE, micro_batch_tokens=40)
    module = tiny("llama")
    leaves = {
        block.param.name: view.trained.parameter(block.param.name).detach().clone().requires_grad_(True)
        for block in view.trained.layout.blocks
    }
    weights = {name.removeprefix("model."): param.detach() for name, param in module.named_parameters()}
    names = [name.removesuffix(".lora_A.weight") for name in leaves if name.endswith(".lora_A.weight")]
    assert len(names) == 2 * 7, "every linear layer of both decoder layers"
    for name in names:
        delta = leaves[f"{name}.lora_B.weight"] @ leaves[f"{name}.lora_A.weight"]
        key = f"{name.removeprefix('model.')}.weight"
        weights[key] = weights[key] + SCALE * delta

    def decoder(**inputs: Any) -> Any:
        return functional_call(module.model, weights, (), inputs)

    with ExactFloat64():
        pad = padded(decoder, rows)
        logprobs_NL, _ = pad.logprobs(module, TEMPERATURE)
        advantages_N1 = torch.tensor(rows.columns[ADVANTAGES])[:, None]
        loss = (-advantages_N1 * logprobs_NL).sum() / rows.num_tokens
        loss.backward()
        metrics = stepped(trainer, rows)
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-9)
    largest = max(float(leaf.grad.abs().max()) for leaf in leaves.values())
    assert largest > 1e-3
    for block, start, stop in view.trained.layout.entries:
        found = trainer.optimizer.gradients[start:stop].view(block.shape)
        assert (found - leaves[block.param.name].grad).abs().max() <= 1e-9 * largest, block.param.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapter_has_buffers(dtype):
    """Masters, moments and gradients are as long as the adapter; nothing of the base ever requires a gradient."""
    view = adapted(tiny_llama(dtype))
    trainer = make_trainer(view)
    optimizer = trainer.optimizer
    assert optimizer is not None
    adapter = view.trained.layout.num_elements
    assert adapter < view.layout.num_elements / 3
    buffers = (view.trained.weights, optimizer.masters, optimizer.gradients, optimizer.exp_avg, optimizer.exp_avg_sq)
    held = {buffer.data_ptr(): buffer.numel() * buffer.element_size() for buffer in buffers}
    name = str(dtype).removeprefix("torch.")
    assert sum(held.values()) == parameter_bytes(name, trained=True).total * adapter
    seen = []

    def loss(batch: Any) -> Tensor:
        seen.append({name for name, param in view.module.named_parameters() if param.requires_grad})
        return batch.aggregate(batch.logprobs, "token-mean")

    base = view.weights.clone()
    run_all(train(trainer, random_rows(), {}, loss))
    assert all("lora_" in name for name in seen[0])
    assert len(seen[0]) == len(view.trained.layout.blocks)
    assert not any(param.requires_grad for param in view.module.parameters())
    assert all(param.grad is None for param in view.module.parameters())
    assert torch.equal(view.weights, base)


def test_roles_on_one_backbone_train_apart():
    """An actor and a critic, each with an adapter, over one reference: who trains changes nobody else, bit for bit."""
    rows = random_rows()
    base = tiny_llama(torch.float32)
    actor = adapted(base)
    critic = add_lora(scalar_view(base, seed=1), SETTINGS, name="critic", seed=0)
    trainers = {
        "actor": make_trainer(actor, learning_rate=1e-2),
        "critic": make_trainer(critic, role="critic", learning_rate=1e-2),
        "ref": scorer(without_lora(actor), 64, TEMPERATURE),
    }

    def outputs() -> dict[str, list[float]]:
        asked = {name: Score.VALUES if name == "critic" else Score.LOGPROBS for name in trainers}
        return {name: run_all(trainer.score(rows, asked[name]))[1].tolist() for name, trainer in trainers.items()}

    weights = base.weights.clone()
    plain = outputs()
    assert plain["actor"] != plain["ref"]
    stepped(trainers["actor"], rows)
    after_actor = outputs()
    assert {name for name in plain if plain[name] != after_actor[name]} == {"actor"}
    for step in range(3):
        metrics = stepped(trainers["critic"], rows, step)
    after_critic = outputs()
    assert {name for name in plain if after_actor[name] != after_critic[name]} == {"critic"}
    assert torch.equal(base.weights, weights)
    assert metrics["critic/optimizer_steps"] == 1, "counts of another role than the actor stand under its name"
    assert not any(name.startswith("training/") for name in metrics)


@pytest.mark.parametrize("checkpoint", slow_but([True], [False, True]))
def test_a_state_of_adapters_continues_bit_for_bit(checkpoint):
    options = {"checkpoint_activations": checkpoint, "micro_batch_tokens": 40}
    straight = make_trainer(adapted(tiny_llama(torch.bfloat16)), **options)
    stepped(straight, random_rows(seed=0))
    saved = {name: tensor.clone() for name, tensor in straight.optimizer.state().items()}
    expected = stepped(straight, random_rows(seed=1), 1)
    resumed = make_trainer(add_lora(tiny_llama(torch.bfloat16), SETTINGS, name="actor", seed=9), **options)
    resumed.optimizer.load_state(saved)
    assert stepped(resumed, random_rows(seed=1), 1) == expected
    assert torch.equal(resumed.model.trained.weights, straight.model.trained.weights)

"""The loss that balances experts: Transformers' of each sample, autograd's gradient, and no trace of how it was cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.cost.micro_batch import LargestBatch
from plait.cost.working_memory import Blocks, activations_by_kind
from plait.data.packed import pack
from plait.data.rows import Rows
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from plait.models.model import Model
from plait.models.scalar_loading import scalar_of
from plait.models.shape import ModelShape, config_fields
from plait.training.router_balance import RouterBalance, joined
from plait.training.tally import expert_max_violation
from tests.models.tiny import tiny, tiny_model
from tests.training.batches import evaluate, make_trainer, random_rows, run_all, token_mean, train
from tests.training.exact import ExactFloat64
from tests.training.gradients import assert_equal_gradients

COEFFICIENT = 0.3
FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "granitemoehybrid"]
ROOT = 40


def rows_of() -> Rows:
    """Groups that share prompts, whose prompts begin alike; one response is empty."""
    return random_rows(4, 3, empty=True, root=ROOT).with_root()


def stepped(model: Model, loss: Any = token_mean, **options: Any) -> tuple[dict[str, float], Tensor]:
    """The metrics of an optimizer step, and the gradient that it took."""
    trainer = make_trainer(model, **{"router_aux_loss_coef": COEFFICIENT, "micro_batch_tokens": 90} | options)
    return run_all(train(trainer, rows_of(), {}, loss))[1], trainer.optimizer.gradients.clone()


def router_logits(module: Any, rows: Rows) -> list[tuple[Tensor, ...]]:
    """Of each sample by itself, [tokens, 4] for each layer."""
    ids = [torch.tensor([[*s.prompt.token_ids, *s.all_ids]]) for s in rows.samples]
    return [module.base_model(input_ids=row, use_cache=False, output_router_logits=True).router_logits for row in ids]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_it_is_that_of_transformers_for_each_sample(family, dtype):
    """In float32 too, where the last MLP otherwise computes only what is read."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    with torch.no_grad():
        losses = [load_balancing_loss_func(logits, 4, 2) for logits in router_logits(tiny(family), rows_of())]
    metrics, _ = stepped(tiny_model(family, dtype=getattr(torch, dtype)))
    assert metrics["actor/router_aux_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def plain_loss(module: Any, rows: Rows) -> Tensor:
    """Of padded rows of one, with nothing of plait: the mean log-prob of response tokens, and the mean over samples of
    E Σ f P."""
    sums, losses = [], []
    for sample, logits in zip(rows.samples, router_logits(module, rows), strict=True):
        probs = torch.cat(logits).softmax(-1)
        chosen = torch.nn.functional.one_hot(probs.topk(2).indices, 4).sum(1).to(probs.dtype)
        losses.append(4 * (chosen.mean(0) * probs.mean(0)).sum())
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.all_ids]])
        start = len(sample.prompt.token_ids)
        said = (module(input_ids=ids, use_cache=False).logits[0, start - 1 : -1] / 0.7).log_softmax(-1)
        sums.append(said.gather(1, ids[0, start:, None]).sum())
    return torch.stack(sums).sum() / rows.num_tokens + COEFFICIENT * torch.stack(losses).mean()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_its_gradient_is_autograds(family):
    module = tiny(family)
    with ExactFloat64():
        plain_loss(module, rows_of()).backward()
    trainer = make_trainer(tiny_model(family), router_aux_loss_coef=COEFFICIENT, micro_batch_tokens=90)
    run_all(train(trainer, rows_of(), {}, token_mean))
    assert_equal_gradients(trainer, module, 1e-9)


def test_it_is_the_same_however_samples_are_cut_and_activations_kept():
    """All in one forward; micro-batches of a prompt or a part of its samples each; activations computed again."""
    hows = [{"micro_batch_tokens": 10_000}, {}, {"micro_batch_tokens": 60}, {"checkpoint_activations": True}]
    found = [stepped(tiny_model("qwen3_moe"), **how) for how in hows]
    assert len({metrics["training/tokens_computed"] for metrics, _ in found}) > 1
    for (before, one), (after, other) in pairwise(found):
        for name in ("actor/router_aux_loss", "actor/expert_max_violation", "actor/loss", "actor/grad_norm"):
            assert after[name] == pytest.approx(before[name], rel=1e-9)
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_it_keeps_for_the_backward_is_predicted(checkpoint):
    """The logits of all routers, as `working_memory` counts them, and beside them which tokens are of which sample."""
    model, rows = tiny_model("mixtral", dtype=torch.float32), rows_of()
    groups = [(sample.prompt.token_ids, [sample.all_ids]) for sample in rows.samples]
    batch, logits, kept = pack(groups), list[Tensor](), dict[int, int]()
    model.stage(batch, checkpoint=checkpoint, router_logits=logits)

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        RouterBalance.of(model.config, torch.float32, COEFFICIENT).sums(batch, logits, None)
    shape = ModelShape.from_config(config_fields(model.config))
    largest = LargestBatch(batch.num_tokens, 0)
    plain, balanced = (
        activations_by_kind(shape, largest, Blocks(4, False, checkpointed=checkpoint, balanced=told))[0].kept
        for told in (False, True)
    )
    assert sum(kept.values()) == balanced - plain + 4 * len(rows) * batch.num_tokens


def test_a_scalar_model_has_it_too():
    """And dense layers among the mixtures, which have no router."""
    model = scalar_of(tiny_model("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1]), seed=3)
    value_loss = lambda batch: batch.aggregate((batch.values - 1) ** 2, "token-mean")
    balanced, one = stepped(model, value_loss, role="critic")
    plain, other = stepped(model, value_loss, role="critic", router_aux_loss_coef=0.0)
    assert 1.9 < balanced["critic/router_aux_loss"] < 4
    assert not torch.equal(one, other)
    assert balanced.keys() - plain.keys() == {"critic/router_aux_loss", "critic/expert_max_violation"}


def test_adapters_are_trained_by_it_below_routers_that_stay():
    pytest.importorskip("peft")

    def adapted() -> Model:
        view = add_lora(tiny_model("qwen3_moe"), LoraSettings(rank=3), name="actor", seed=0)
        view.trained.weights.add_(0.05)
        return view

    metrics, with_it = stepped(adapted())
    same, without = stepped(adapted(), router_aux_loss_coef=0.0)
    assert metrics["actor/loss"] == same["actor/loss"], "which says what the flow's loss is, in training as evaluated"
    assert (with_it - without).abs().max() > 1e-4


def test_an_evaluation_says_the_loss_alone():
    trainer = make_trainer(tiny_model("qwen3_moe"), router_aux_loss_coef=COEFFICIENT)
    metrics = run_all(evaluate(trainer, rows_of(), {}, token_mean))[1]
    assert metrics.keys() == {"actor/loss", "actor/entropy"}


BALANCE = RouterBalance(1.0, num_experts=4, top_k=2, wide=torch.float32)


def test_losses_by_hand():
    """One sample of 3 tokens whose experts are all alike, one of 2 tokens that take the experts 0 and 1 alone."""
    chosen = torch.tensor([[1.5, 1.5, 1.5, 1.5], [2.0, 2.0, 0.0, 0.0]])
    probs = torch.tensor([[0.75, 0.75, 0.75, 0.75], [1.0, 0.8, 0.1, 0.1]])
    # 4 · 4 · (1/2 · 1/4) = 2, the least; 4 · (1 · 1/2 + 1 · 0.4) = 3.6
    assert BALANCE.losses(torch.stack([chosen, probs])).tolist() == pytest.approx([2.0, 3.6])


def test_how_unevenly_experts_are_used_by_hand():
    assert expert_max_violation([[2, 2, 2, 2]]) == 0
    assert expert_max_violation([[8, 0, 0, 0], [2, 2, 4, 0]]) == (3 + 1) / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_pass_between_stages_bit_for_bit(dtype):
    """Behind hidden states of whatever dtype, an odd number of them among it."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, generator=generator).to(dtype)
    sums = torch.randn(2, 7, 4, generator=generator)
    message = joined((hidden, sums))
    room = BALANCE.room(hidden, 7)
    assert (message.shape, message.dtype) == (room.shape, room.dtype)
    assert all(map(torch.equal, BALANCE.parted(message.clone(), 3, 7), (hidden, sums)))

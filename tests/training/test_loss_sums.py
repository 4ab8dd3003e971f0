"""Several losses in one optimizer step: their gradients add up, each over samples of its own."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from plait.algorithms.losses import cross_entropy
from plait.data.rows import Rows
from plait.dataflow import Column, Level
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from plait.training.mini_batch import LossCall, LossTerm
from tests.cases import slow_but
from tests.models.tiny import tiny, tiny_llama, tiny_model
from tests.training.batches import ADVANTAGES, NO_CLIP, make_trainer, random_rows, run_all
from tests.training.test_trainer import eager_all

MASK = Column("trained", Level.TOKEN, 9, 9)
COEF, RATE, CLIP = 0.3, 1e-3, 0.05
NEAR = 1e-12


def policy_loss(batch, advantages):
    return batch.aggregate(-advantages * batch.logprobs, "seq-mean-token-mean")


def drawn(num_prompts: int = 4) -> Rows:
    return random_rows(num_prompts, seed=1)


def examples(num_prompts: int = 5, mask: float | None = None) -> Rows:
    """One given sample each; half of the tokens are trained, or as `mask` says."""
    rows = random_rows(num_prompts, 1, seed=2)
    drawn_R = np.random.default_rng(3).integers(0, 2, rows.num_tokens)
    return rows.with_column(MASK, drawn_R.astype(float) if mask is None else np.full(rows.num_tokens, mask))


def of_policy(rows: Rows, mini_batches: int = 1, epochs: int = 1) -> LossTerm:
    return LossTerm(rows, LossCall(policy_loss, {"advantages": ADVANTAGES}, name="actor.train"), mini_batches, epochs)


def of_examples(rows: Rows, mini_batches: int = 1, epochs: int = 1) -> LossTerm:
    """At a temperature of 1, as given samples have it."""
    loss = partial(cross_entropy, coef=COEF, name="actor/ptx_loss")
    call = LossCall(loss, mask=MASK, temperature=1.0, name="actor.train#2")
    return LossTerm(rows, call, mini_batches, epochs)


def trained(terms, model=None, **options):
    """The trainer after one call, its actions and the metrics of each term."""
    trainer = make_trainer(tiny_llama(torch.float64) if model is None else model, **options)
    done, metrics = run_all(trainer.train(terms, step=0))
    return trainer, [one.action for one in done], metrics


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= NEAR * expected.abs().max())


def test_one_step_is_that_of_the_summed_loss(exact_float64):
    """Autograd of the sum over Transformers' own forward, sample by sample; then clipping and AdamW by torch."""
    rows, given, module = drawn(), examples(), tiny()
    logprobs = [
        [eager_all(module, sample)[range(sample.num_tokens), list(sample.token_ids)] for sample in table.samples]
        for table in (rows, given)
    ]
    policy = -sum(a * part.mean() for a, part in zip(rows.columns[ADVANTAGES], logprobs[0], strict=True)) / len(rows)
    at_one = torch.cat(
        [
            (eager_all(module, sample) * 0.7).log_softmax(-1)[range(sample.num_tokens), list(sample.token_ids)]
            for sample in given.samples
        ]
    )
    mask_R = torch.tensor(given.columns[MASK])
    ptx = -(at_one * mask_R).sum() / mask_R.sum()
    adamw = torch.optim.AdamW(module.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    (policy + COEF * ptx).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf"))
    for parameter in module.parameters():
        parameter.grad.mul_(min(1.0, CLIP / float(norm)))
    adamw.step()
    assert norm > CLIP, "the step is clipped"

    unclipped, _, _ = trained([of_policy(rows), of_examples(given)], max_grad_norm=NO_CLIP)
    options = {"max_grad_norm": CLIP, "learning_rate": RATE, "weight_decay": 0.0, "betas": (0.9, 0.999)}
    trainer, _, (first, second) = trained([of_policy(rows), of_examples(given)], epsilon=1e-8, **options)
    for block, start, stop in trainer.model.trained.layout.entries:
        name = block.param.name
        assert near(unclipped.optimizer.gradients[start:stop].view(block.shape), gradients[name]), name
        parameter = module.get_parameter(name).detach()
        assert (trainer.model.trained.weights[start:stop].view(block.shape) - parameter).abs().max() < 1e-10, name
    assert first["actor/loss"] == pytest.approx(float(policy.detach()), rel=NEAR)
    assert first["actor/grad_norm"] == pytest.approx(float(norm), rel=NEAR)
    assert second["actor/loss"] == pytest.approx(COEF * float(ptx.detach()), rel=NEAR)
    assert second["actor/ptx_loss"] == pytest.approx(float(ptx.detach()), rel=NEAR)


def test_the_first_loss_tells_of_the_steps_of_both():
    trainer, done, (first, second) = trained([of_policy(drawn(), 2, 2), of_examples(examples(), 4)])
    assert trainer.optimizer.attempted_steps == first["training/optimizer_steps"] == 4
    of_steps = ("actor/grad_norm", "actor/lr", "training/optimizer_steps", "training/skipped_steps")
    assert set(of_steps) <= first.keys()
    assert not set(of_steps) & second.keys()
    assert first["training/tokens_computed"] > second["training/tokens_computed"] > 0
    assert {"actor/loss", "actor/entropy", "training/mask_coverage"} <= first.keys() & second.keys()
    # Micro-batches of a mini-batch one behind the other, then one step.
    of_first = [name for name in done if "/b0/" in name]
    assert [name.split("/")[0] for name in of_first] == sorted(name.split("/")[0] for name in of_first)
    assert {name.split("/")[0] for name in of_first} == {"actor.train", "actor.train#2"}
    assert [name for name in done if name.endswith("/step")] == [f"actor.train#2/b{n}/step" for n in range(4)]
    assert len(set(done)) == len(done)


@pytest.mark.parametrize("budget", slow_but([1], [1, 23, 10_000]))
def test_neither_micro_batches_nor_recomputation_change_the_sum(budget):
    terms = [of_policy(drawn(), 2), of_examples(examples(), 2)]
    expected, _, _ = trained(terms)
    found, _, _ = trained(terms, micro_batch_tokens=budget, checkpoint_activations=budget == 23)
    assert near(found.model.trained.weights, expected.model.trained.weights)


def test_gradients_add_up_and_a_third_loss_may_be_among_them():
    terms = [of_policy(drawn()), of_examples(examples()), of_examples(examples(3, 1.0))]
    alone = sum(trained([term])[0].optimizer.gradients for term in terms)
    together, _, metrics = trained(terms)
    assert near(together.optimizer.gradients, alone)
    assert len(metrics) == 3


def test_an_adapter_is_trained_by_the_sum():
    def adapted():
        return add_lora(tiny_llama(torch.float64), LoraSettings(rank=4), name="actor", seed=0)

    terms = [of_policy(drawn()), of_examples(examples())]
    alone = sum(trained([term], adapted())[0].optimizer.gradients for term in terms)
    assert near(trained(terms, adapted())[0].optimizer.gradients, alone)


@pytest.mark.parametrize("masked_first", [True, False])
def test_a_loss_without_a_trained_token_leaves_the_step_to_the_other(masked_first):
    masked, policy = of_examples(examples(mask=0.0), 2), of_policy(drawn(), 2)
    terms = [masked, policy] if masked_first else [policy, masked]
    alone, _, _ = trained([policy])
    found, done, metrics = trained(terms)
    assert torch.equal(found.model.trained.weights, alone.model.trained.weights)
    of_masked, of_policy_ = metrics if masked_first else reversed(metrics)
    assert (of_masked["actor/loss"], of_masked["training/masked_mini_batches"]) == (0.0, 2)
    assert (of_masked["training/tokens_computed"], of_policy_["training/masked_mini_batches"]) == (0, 0)
    assert metrics[0]["training/optimizer_steps"] == 2
    assert metrics[0]["actor/grad_norm"] > 0
    assert "actor/grad_norm" not in metrics[1]
    assert all("/mb" not in name for name in done if name.startswith("actor.train#2"))


def test_where_nothing_is_trained_there_is_no_step():
    rows = drawn().with_column(MASK, np.zeros(drawn().num_tokens))
    policy = LossTerm(rows, LossCall(policy_loss, {"advantages": ADVANTAGES}, mask=MASK))
    trainer, done, metrics = trained([policy, of_examples(examples(mask=0.0))])
    assert (trainer.optimizer.attempted_steps, done) == (0, [])
    assert [one["training/masked_mini_batches"] for one in metrics] == [1, 1]
    assert (metrics[0]["training/optimizer_steps"], metrics[0]["actor/loss"]) == (0, 0.0)


@pytest.mark.parametrize("fewer_first", [True, False])
def test_a_loss_of_fewer_mini_batches_has_no_part_in_the_last_steps(fewer_first):
    """Two samples give two mini-batches where three are asked for: two steps of both, then one of the other alone."""
    few, many = of_examples(examples(2, 1.0), 3), of_policy(drawn(), 3)
    trainer, done, metrics = trained([few, many] if fewer_first else [many, few])
    assert trainer.optimizer.attempted_steps == metrics[0]["training/optimizer_steps"] == 3
    steps = [name.rpartition("/")[0] for name in done if name.endswith("/step")]
    last = "actor.train" if fewer_first else "actor.train#2"
    assert steps == [f"{last}/b0", f"{last}/b1", "actor.train/b2"]
    for number, calls in enumerate(
        [{"actor.train", "actor.train#2"}, {"actor.train", "actor.train#2"}, {"actor.train"}]
    ):
        assert {name.split("/")[0] for name in done if f"/b{number}/mb" in name} == calls


def test_a_loss_without_samples_leaves_all_steps_to_the_other():
    alone, _, (expected,) = trained([of_policy(drawn(), 2)])
    found, _, metrics = trained([of_examples(examples(5).select([])), of_policy(drawn(), 2)])
    assert torch.equal(found.model.trained.weights, alone.model.trained.weights)
    assert metrics[0]["training/optimizer_steps"] == 2
    assert metrics[0]["actor/grad_norm"] == expected["actor/grad_norm"]
    assert metrics[1]["actor/loss"] == expected["actor/loss"]
    assert "actor/loss" not in metrics[0]


def test_a_step_is_skipped_if_either_loss_is_no_number():
    rows = drawn()
    broken = rows.with_column(ADVANTAGES, np.full(len(rows), np.nan))
    for terms in ([of_policy(broken), of_examples(examples())], [of_examples(examples()), of_policy(broken)]):
        trainer, _, metrics = trained(terms)
        assert (metrics[0]["training/skipped_steps"], metrics[0]["training/nonfinite_losses"]) == (1, 1)
        assert torch.equal(trainer.model.trained.weights, tiny_llama(torch.float64).trained.weights)
        assert "actor/ptx_loss" not in {**metrics[0], **metrics[1]}, "what a skipped step saw is in no mean"


def test_routers_are_balanced_over_all_samples_of_a_step():
    """Without another loss than theirs: as by one loss over all samples, whose mean weighs each sample alike."""

    def nothing(batch):
        return 0 * batch.aggregate(batch.logprobs, "token-mean")

    def gradients(*tables: Rows) -> torch.Tensor:
        model = tiny_model(family="qwen3_moe", dtype=torch.float64)
        terms = [LossTerm(table, LossCall(nothing)) for table in tables]
        return trained(terms, model, router_aux_loss_coef=0.1)[0].optimizer.gradients

    rows = random_rows(6, 2, seed=5)
    whole = gradients(rows)
    assert whole.abs().max() > 1e-6
    assert near(gradients(rows.select(range(2)), rows.select(range(2, 12))), whole)

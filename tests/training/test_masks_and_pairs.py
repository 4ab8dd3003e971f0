"""Masked, paired and scalar losses of real models: against a padded plain-PyTorch oracle, and invariant to every split.

Float64, equal to 1e-9 of the largest entry. Each loss uses what a family of algorithms does: policy losses with a mask,
DPO's sums per sequence and pairs, a critic's values, a reward model's scores.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from plait.data.records import Reply
from plait.data.rows import Rows
from plait.dataflow import Column, Level, Score
from plait.errors import RunError
from plait.models.scalar_loading import scalar_of
from plait.training.trainer import Trainer
from tests.cases import slow_but
from tests.models.tiny import tiny, tiny_llama
from tests.training.batches import (
    ADVANTAGES,
    MAX_RESPONSE_TOKENS,
    REF,
    evaluate,
    make_trainer,
    random_rows,
    run_all,
    token_mean,
    train,
)
from tests.training.padded import Padded, gradients_of, padded

pytestmark = pytest.mark.usefixtures("exact_float64")

TEMPERATURE = 0.7
MASK = Column("trained", Level.TOKEN, 6, 0)
BETA = Column("beta", Level.BATCH, 7, 7)
BETA_VALUE = np.array(0.3)
TOKEN_LOSSES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def masked_rows(*, seed: int = 0, drop: tuple[int, ...] = (), pairs: bool = False) -> Rows:
    """Rows with a reference column and a mask that keeps most tokens, none of the samples at `drop`."""
    rows = random_rows(5 if pairs else 4, 2 if pairs else 3, seed=seed)
    rng = np.random.default_rng(seed + 100)
    mask = (rng.random(rows.num_tokens) < 0.7).astype(np.float64)
    mask[rows.offsets[:-1]] = 1.0
    mask[rows.token_places(drop)] = 0.0
    assert 0.4 < mask.mean() < 0.9
    return rows.with_column(MASK, mask).with_column(REF, -5 + rng.normal(size=rows.num_tokens))


@dataclass(frozen=True)
class PolicyLoss:
    """Advantage-weighted, with an entropy bonus and a log of its own; beta comes as a scalar of the whole batch."""

    how: str

    def __call__(self, batch: Any, advantages: Tensor, beta: Tensor) -> Tensor:
        assert beta.shape == (), "a BATCH column is a scalar"
        batch.log("surprise", -batch.logprobs)
        batch.log("length", batch.per_sequence(torch.ones_like(batch.logprobs)), per="sequence")
        sums_R = batch.sequence_sum(batch.logprobs)
        return batch.aggregate(-advantages * batch.logprobs - beta * batch.entropies + 0.01 * sums_R**2, self.how)

    def oracle(self, pad: Padded, module: Any, rows: Rows) -> tuple[Tensor, dict[str, float]]:
        logp_NL, entropies_NL = pad.logprobs(module, TEMPERATURE)
        mask_NL = pad.mask_NL
        advantages_N1 = torch.tensor(rows.columns[ADVANTAGES])[:, None]
        sums_N1 = (logp_NL * mask_NL).sum(1, keepdim=True)
        loss_NL = (-advantages_N1 * logp_NL - float(BETA_VALUE) * entropies_NL + 0.01 * sums_N1**2) * mask_NL
        lengths_N = mask_NL.sum(1)
        count = (lengths_N > 0).sum()
        loss = {
            "token-mean": loss_NL.sum() / mask_NL.sum(),
            "seq-mean-token-mean": (loss_NL.sum(1) / lengths_N.clamp(min=1)).sum() / count,
            "seq-mean-token-sum-norm": loss_NL.sum() / count / MAX_RESPONSE_TOKENS,
        }[self.how]
        metrics = {
            "actor/entropy": (entropies_NL * mask_NL).sum() / mask_NL.sum(),
            "surprise": -(logp_NL * mask_NL).sum() / mask_NL.sum(),
            "length": lengths_N.sum() / count,
        }
        return loss, {name: value.item() for name, value in metrics.items()}


def dpo_loss(batch: Any, ref_logprobs: Tensor) -> Tensor:
    chosen_P, rejected_P = batch.pairs(batch.per_sequence(batch.logprobs - ref_logprobs))
    batch.log("accuracy", (chosen_P > rejected_P).double(), per="pair")
    sft = batch.mean_over_sequences(batch.per_sequence(batch.logprobs))
    return batch.mean_over_pairs(-F.logsigmoid(0.1 * (chosen_P - rejected_P))) - 0.05 * sft


def dpo_oracle(pad: Padded, module: Any, rows: Rows) -> tuple[Tensor, dict[str, float]]:
    logp_NL, _ = pad.logprobs(module, TEMPERATURE)
    sums_N = ((logp_NL - pad.column(rows.columns[REF])) * pad.mask_NL).sum(1)
    counted_N = pad.mask_NL.sum(1) > 0
    chosen_P, rejected_P = sums_N[0::2], sums_N[1::2]
    both_P = counted_N[0::2] & counted_N[1::2]
    losses_P = -F.logsigmoid(0.1 * (chosen_P - rejected_P))
    loss = losses_P[both_P].mean() - 0.05 * (logp_NL * pad.mask_NL).sum() / counted_N.sum()
    return loss, {"accuracy": (chosen_P > rejected_P)[both_P].double().mean().item()}


def critic_loss(batch: Any, ref_logprobs: Tensor) -> Tensor:
    batch.log("value", batch.values)
    return batch.aggregate(0.5 * (batch.values - ref_logprobs) ** 2, "token-mean")


def critic_oracle(pad: Padded, score: Tensor, rows: Rows) -> tuple[Tensor, dict[str, float]]:
    values_NL = (pad.hidden_NLH @ score.t())[..., 0]
    errors_NL = 0.5 * (values_NL - pad.column(rows.columns[REF])) ** 2 * pad.mask_NL
    total = pad.mask_NL.sum()
    return errors_NL.sum() / total, {"value": ((values_NL * pad.mask_NL).sum() / total).item()}


def reward_loss(batch: Any) -> Tensor:
    chosen_P, rejected_P = batch.pairs(batch.scores)
    batch.log("accuracy", (chosen_P > rejected_P).double(), per="pair")
    batch.log("score", batch.scores, per="sequence")
    return batch.mean_over_pairs(-F.logsigmoid(chosen_P - rejected_P))


def reward_oracle(pad: Padded, score: Tensor, rows: Rows) -> tuple[Tensor, dict[str, float]]:
    scores_N = (pad.last_NH @ score.t())[:, 0]
    margins_P = scores_N[0::2] - scores_N[1::2]
    metrics = {"accuracy": (margins_P > 0).double().mean().item(), "score": scores_N.mean().item()}
    return -F.logsigmoid(margins_P).mean(), metrics


def language(**options: Any) -> Trainer:
    return make_trainer(tiny_llama(torch.float64), **options)


def scalar(**options: Any) -> Trainer:
    """Its head is made large, so that losses bend."""
    model = scalar_of(tiny_llama(torch.float64), seed=3)
    with torch.no_grad():
        model.module.score.weight.copy_(head())
    return make_trainer(model, role="critic", **options)


def head() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(1, 32, dtype=torch.float64, generator=generator)


def flat_gradients(trainer: Trainer) -> dict[str, Tensor]:
    gradients = trainer.optimizer.gradients
    return {
        block.param.name: gradients[start:stop].view(block.shape).clone()
        for block, start, stop in trainer.model.trained.layout.entries
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal to 1e-9 of the largest entry of all."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3, "the gradient must not be trivial"
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-9 * largest, name


def assert_same_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


CASES = {
    **{
        f"policy {how}": ("language", PolicyLoss(how), {"advantages": ADVANTAGES, "beta": BETA}) for how in TOKEN_LOSSES
    },
    "dpo": ("language", dpo_loss, {"ref_logprobs": REF}),
    "critic": ("scalar", critic_loss, {"ref_logprobs": REF}),
    "reward": ("scalar", reward_loss, {}),
}


def run_case(case: str, rows: Rows, **options: Any) -> tuple[dict[str, Tensor], dict[str, float], Trainer]:
    """One optimizer step over all rows: gradients, metrics, trainer."""
    kind, loss, columns = CASES[case]
    trainer = {"language": language, "scalar": scalar}[kind](**options)
    asked: dict[str, Any] = {"whole_groups": case in ("dpo", "reward"), "batch_values": {BETA: BETA_VALUE}}
    if case != "reward":
        asked["mask"] = MASK
    _, metrics = run_all(train(trainer, rows, columns, loss, **asked))
    return flat_gradients(trainer), metrics, trainer


def rows_of(case: str, **kwargs: Any) -> Rows:
    drop = (1,) if case.startswith("policy") else (3,)
    return masked_rows(drop=drop, pairs=case in ("dpo", "reward"), **kwargs)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_a_padded_batch(case):
    rows = rows_of(case)
    found, metrics, trainer = run_case(case, rows, micro_batch_tokens=40)
    module = tiny("llama")
    mask = rows.columns[MASK]
    if case.startswith("policy"):
        loss, logged = CASES[case][1].oracle(padded(module.model, rows, mask), module, rows)
    elif case == "dpo":
        loss, logged = dpo_oracle(padded(module.model, rows, mask), module, rows)
    else:
        score = head().requires_grad_(True)
        oracle = critic_oracle if case == "critic" else reward_oracle
        loss, logged = oracle(padded(module.model, rows, mask), score, rows)
    loss.backward()
    names = [name for name in found if name != "score.weight"]
    expected = gradients_of(module, names)
    if "score.weight" in found:
        expected["score.weight"] = score.grad
    assert_close(found, expected)
    assert_same_metrics(metrics, {f"{trainer.role}/loss": loss.item(), **logged})


@pytest.mark.parametrize("case", slow_but(list(CASES)[::2], CASES))
def test_neither_gradient_nor_metric_depends_on_split_order_or_packing(case):
    rows = rows_of(case)
    expected, whole, _ = run_case(case, rows, micro_batch_tokens=10_000)
    shuffled = rows.select(random.Random(1).sample(range(len(rows)), len(rows)))
    for given, budget in ((rows, 1), (shuffled, 30), (shuffled, 50)):
        found, metrics, _ = run_case(case, given, micro_batch_tokens=budget)
        assert_close(found, expected)
        assert metrics.keys() == whole.keys()
        computed = next(name for name in whole if name.endswith("tokens_computed"))
        assert_same_metrics(metrics, {name: value for name, value in whole.items() if name != computed})


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_says_what_a_step_would(case):
    """And changes nothing: no weight, no count, no gradient that is required."""
    rows = rows_of(case)
    kind, loss, columns = CASES[case]
    trainer = {"language": language, "scalar": scalar}[kind](micro_batch_tokens=40)
    asked: dict[str, Any] = {"whole_groups": case in ("dpo", "reward"), "batch_values": {BETA: BETA_VALUE}}
    asked |= {} if case == "reward" else {"mask": MASK}
    before = {name: tensor.clone() for name, tensor in trainer.optimizer.state().items()}
    done, found = run_all(evaluate(trainer, rows, columns, loss, **asked))
    assert {record.kind for record in done} == {"SCORE"}
    assert [record.action for record in done] == [f"{trainer.role}.evaluate/mb{i}" for i in range(len(done))]
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.optimizer.state().items())
    assert not any(parameter.requires_grad for parameter in trainer.model.module.parameters())
    _, metrics = run_all(train(trainer, rows, columns, loss, **asked))
    assert found == {name: metrics[name] for name in found}
    logged = {"surprise", "length", "accuracy", "value", "score"} & metrics.keys()
    assert logged | {f"{trainer.role}/loss"} <= found.keys()
    _, after = run_all(evaluate(trainer, rows, columns, loss, **asked))
    assert after[f"{trainer.role}/loss"] != found[f"{trainer.role}/loss"], "the step has moved the weights"


def test_a_scalar_model_scores_in_any_order():
    """Values and scores of single samples, whatever rows and micro-batches they come in; an empty response has one."""
    rows = random_rows(empty=True)
    module = tiny("llama").model
    with torch.no_grad():
        alone = [padded(module, rows.select([i])) for i in range(len(rows)) if rows.samples[i].token_ids]
        values = np.concatenate([(pad.hidden_NLH @ head().t())[0, :, 0].numpy() for pad in alone])
        ids = [torch.tensor([[*s.prompt.token_ids, *s.token_ids]]) for s in rows.samples]
        last = [module(input_ids=row, use_cache=False).last_hidden_state[0, -1] for row in ids]
        scores = (torch.stack(last) @ head().t())[:, 0].numpy()
    for budget in (1, 40, 1000):
        trainer = scalar(micro_batch_tokens=budget)
        order = random.Random(budget).sample(range(len(rows)), len(rows))
        given = rows.select(order)
        done, found = run_all(trainer.score(given, Score.VALUES))
        np.testing.assert_allclose(found, values[rows.token_places(order)], rtol=1e-9, atol=1e-10)
        assert {record.kind for record in done} == {"SCORE"}
        done, found = run_all(trainer.score(given, Score.SCORE, call="reward.score"))
        np.testing.assert_allclose(found, scores[order], rtol=1e-9, atol=1e-10)
        assert [record.action for record in done] == [f"reward.score/mb{i}" for i in range(len(done))]


def test_a_role_is_asked_for_what_its_model_has():
    rows = random_rows()
    with pytest.raises(
        RunError, match=r"critic.logprobs: role `critic` is a scalar model, which has values and scores"
    ):
        run_all(scalar().score(rows, Score.LOGPROBS))
    for what, name in ((Score.VALUES, "values"), (Score.SCORE, "scores")):
        with pytest.raises(RunError, match=rf"actor.{name}: role `actor` is a language model, which has logprobs"):
            run_all(language().score(rows, what))
    with pytest.raises(RunError, match="role `critic` is a scalar model"):
        run_all(train(scalar(), rows, {}, lambda batch: batch.logprobs.sum()))


def test_a_token_that_the_model_has_not_is_named():
    """A policy may have more rows than a critic of the same tokenizer, and draw one of them."""
    rows = random_rows()
    samples = list(rows.samples)
    samples[4] = replace(samples[4], token_ids=(5, 9999), logprobs=(-1.0, -1.0))
    for samples_of in (Rows(tuple(samples)), Rows((replace(samples[0], replies=(Reply(1, (9999,)),)),))):
        with pytest.raises(RunError, match=r"sample 1\d.\d has token 9999, but the model `.*`, .* tokens 0 to \d+;"):
            run_all(scalar().score(samples_of, Score.VALUES))


def test_a_mini_batch_that_is_masked_altogether_is_no_step():
    """It moves no weight, also where the moments of earlier steps would; it is counted, and reports a loss of 0."""
    rows = random_rows()
    trainer = language()
    run_all(train(trainer, rows, {}, token_mean))
    before = {name: tensor.clone() for name, tensor in trainer.optimizer.state().items()}
    nothing = rows.with_column(MASK, np.zeros(rows.num_tokens))
    done, metrics = run_all(train(trainer, nothing, {}, token_mean, mini_batches=2, epochs=1, step=1, mask=MASK))
    assert done == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.optimizer.state().items())
    expected = {"actor/loss": 0, "training/masked_mini_batches": 2, "training/optimizer_steps": 0}
    assert metrics.items() >= (expected | {"training/mask_coverage": 0, "training/skipped_steps": 0}).items()
    _, found = run_all(evaluate(trainer, nothing, {}, token_mean, mask=MASK))
    assert found == {"actor/loss": 0}
    assert run_all(evaluate(trainer, Rows(()), {}, token_mean))[1] == {}


def test_a_masked_mini_batch_leaves_the_metrics_of_the_others_alone():
    rows = random_rows()
    uids = list(rows.groups)
    mask = np.ones(rows.num_tokens)
    for uid in uids[:2]:
        mask[rows.token_places(rows.groups[uid])] = 0
    rows = rows.with_column(MASK, mask)
    trainer = language()
    _, expected = run_all(evaluate(trainer, rows, {}, token_mean, mask=MASK))
    # Four mini-batches of one prompt each: two are masked, two are steps. The first step's metrics are untouched ones.
    _, metrics = run_all(train(language(), rows, {}, token_mean, mini_batches=4, epochs=1, step=0, mask=MASK))
    assert metrics["training/masked_mini_batches"] == 2
    assert metrics["training/optimizer_steps"] == 2
    assert metrics["actor/entropy"] == pytest.approx(expected["actor/entropy"], rel=0.05)
    assert metrics["training/mask_coverage"] == mask.mean()


def test_a_mask_of_weights_is_refused():
    rows = random_rows()
    halves = rows.with_column(MASK, np.full(rows.num_tokens, 0.5))
    with pytest.raises(
        RunError, match=r"mask=….: expected 1 where a token is trained .* found 0.5 in trained\[token\]"
    ):
        run_all(train(language(), halves, {}, token_mean, mask=MASK))


def test_pairs_stay_together():
    """Mini-batches and micro-batches of single pairs; without whole_groups the loss says what is missing."""
    rows = masked_rows(pairs=True)
    seen: list[int] = []

    def loss(batch: Any) -> Tensor:
        chosen_P, rejected_P = batch.pairs(batch.scores)
        seen.append(len(chosen_P))
        return batch.mean_over_pairs(rejected_P - chosen_P)

    trainer = scalar(micro_batch_tokens=1)
    run_all(train(trainer, rows, {}, loss, mini_batches=20, epochs=2, step=0, whole_groups=True))
    assert seen == [1] * 10
    with pytest.raises(RunError, match="whole_groups=True"):
        run_all(train(trainer, rows, {}, loss, mini_batches=20, epochs=2, step=0))


def test_given_samples_are_scored_at_their_own_temperature():
    rows = random_rows()
    trainer = language()
    _, sampled = run_all(trainer.score(rows, Score.LOGPROBS))
    _, given = run_all(trainer.score(rows, Score.LOGPROBS, temperature=1.0))
    _, expected = run_all(language(temperature=1.0).score(rows, Score.LOGPROBS))
    assert given.tolist() == expected.tolist()
    assert np.abs(given - sampled).max() > 0.1
    works = [by(trainer, rows, {}, token_mean, temperature=1.0) for by in (evaluate, train)]
    assert [run_all(work)[1]["actor/loss"] for work in works] == pytest.approx([expected.mean()] * 2, rel=1e-12)

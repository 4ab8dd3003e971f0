"""Mini-batches of two models, open together: one schedule of both gives each the bits of training it by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from plait.data.rows import Rows
from plait.dataflow import Column
from plait.models.lora import add_lora
from plait.models.lora_settings import LoraSettings
from plait.models.parallel.peers import Peers
from plait.models.scalar_loading import scalar_of, scalar_view
from plait.schedule.pipeline import Workload
from plait.schedule.validate import validate
from plait.training.mini_batch import LossCall, LossTerm
from plait.training.passes import OpenMiniBatch
from plait.training.pipeline import execute
from plait.training.results import TermResult
from plait.training.trainer import Trainer
from tests.cases import examples, slow_but
from tests.models.tiny import tiny_llama
from tests.training.batches import ADVANTAGES, make_trainer, random_rows, run_all
from tests.training.schedules import shuffled
from tests.training.worker import RETURNS

BUDGET = 25
"""Tokens of a micro-batch: three or more in each mini-batch."""


def policy_loss(batch: Any, advantages: torch.Tensor) -> torch.Tensor:
    batch.log("actor/advantage", advantages)
    return batch.aggregate(-advantages * batch.logprobs - 0.1 * batch.entropies, "token-mean")


def value_loss(batch: Any, returns: torch.Tensor) -> torch.Tensor:
    return batch.aggregate((batch.values - returns) ** 2, "seq-mean-token-mean")


CALLS = {
    "actor": LossCall(policy_loss, {"advantages": ADVANTAGES}),
    "critic": LossCall(value_loss, {"returns": RETURNS}),
}
STEP, MINI_BATCHES = 3, 2


def terms_of(role: str, rows: Rows) -> list[LossTerm]:
    return [LossTerm(rows, CALLS[role], MINI_BATCHES)]


def rows_with(column: Column = RETURNS) -> Rows:
    rows = random_rows(seed=4)
    return rows.with_column(column, np.random.default_rng(4).normal(size=rows.num_tokens)).ordered()


def two_models() -> dict[str, Trainer]:
    """An actor and a critic with weights of their own."""
    dtype = torch.bfloat16
    options = {"micro_batch_tokens": BUDGET, "max_grad_norm": 0.5, "learning_rate": 1e-2}
    return {
        "actor": make_trainer(tiny_llama(dtype), **options),
        "critic": make_trainer(scalar_of(tiny_llama(dtype, seed=2), seed=3), role="critic", **options),
    }


def two_adapters() -> dict[str, Trainer]:
    """An actor and a critic that are adapters of one frozen model."""
    base = tiny_llama(torch.float32)
    adapter = LoraSettings(rank=4)
    options = {"micro_batch_tokens": BUDGET, "learning_rate": 1e-2, "checkpoint_activations": True}
    actor = add_lora(base, adapter, name="actor", seed=0)
    critic = add_lora(scalar_view(base, seed=1, head_std=0.1), adapter, name="critic", seed=0)
    return {"actor": make_trainer(actor, **options), "critic": make_trainer(critic, role="critic", **options)}


def states(trainers: dict[str, Trainer]) -> dict[str, torch.Tensor]:
    return {
        f"{role}/{name}": tensor.clone()
        for role, trainer in trainers.items()
        for name, tensor in {**trainer.optimizer.state(), "weights": trainer.model.trained.weights}.items()
    }


def one_after_the_other(trainers: dict[str, Trainer], rows: Rows) -> dict[str, dict[str, float]]:
    return {role: run_all(trainer.train(terms_of(role, rows), step=STEP))[1][0] for role, trainer in trainers.items()}


def both(opened: dict[str, OpenMiniBatch]) -> Workload:
    """The pipelines of all on one rank."""
    return Workload(tuple(one.pipeline(0, (0,)) for one in opened.values()), 1)


def together(trainers: dict[str, Trainer], rows: Rows, seed: int) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Train both by one random schedule for each pair of mini-batches: metrics, and the actions done."""
    done: list[str] = []
    begun = {role: trainer.begin(terms_of(role, rows), step=STEP) for role, trainer in trainers.items()}
    for number in range(MINI_BATCHES):
        opened = {role: call.open() for role, call in begun.items()}
        workload = both(opened)
        schedule = shuffled(workload, 10 * seed + number)
        validate(schedule, workload)
        stages = {one.key: one.stage for one in opened.values()}
        actions, _ = run_all(execute(schedule, stages, Peers.alone(0, "pp"), name="fused"))
        done += [action.action.removeprefix("fused/") for action in actions]
        for role, call in begun.items():
            call.close(opened[role])
    return {role: call.metrics()[0] for role, call in begun.items()}, done


@pytest.mark.parametrize("models", slow_but([two_adapters], [two_models, two_adapters]))
def test_a_schedule_of_both_gives_the_bits_of_each_alone(models):
    rows = rows_with()
    alone = models()
    metrics = one_after_the_other(alone, rows)
    expected = states(alone)
    assert metrics["actor"]["training/optimizer_steps"] == 2

    for seed in range(examples(1, 4)):
        trainers = models()
        found, done = together(trainers, rows, seed)
        assert found == metrics
        assert all(torch.equal(tensor, expected[name]) for name, tensor in states(trainers).items())
        assert len(done) >= 2 * 2 * 2 * 3, "forward and backward of three micro-batches and more, twice, of two models"


def test_every_rank_knows_the_pipelines_of_all_copies():
    trainer = make_trainer(tiny_llama(), micro_batch_tokens=BUDGET)
    opened = trainer.begin([LossTerm(rows_with(), CALLS["actor"])], step=0).open()
    pipeline = opened.pipeline(0, (3, 1))
    assert (pipeline.model, pipeline.copy, pipeline.ranks) == ("actor", 0, (3, 1))
    assert pipeline.forward_s[0] == tuple(micro.num_tokens for micro in opened.copies[0])
    assert opened.key == ("actor", 0)


def test_a_mini_batch_is_closed_when_all_of_it_is_done():
    trainer = make_trainer(tiny_llama(), micro_batch_tokens=BUDGET)
    begun = trainer.begin([LossTerm(rows_with(), CALLS["actor"])], step=0)
    opened = begun.open()
    for index in range(len(opened.stage.micros) - 1):
        opened.stage.forward(index, None)
        opened.stage.backward(index, None)
    opened.stage.forward(len(opened.stage.micros) - 1, None)
    with pytest.raises(AssertionError, match=r"actor: (\d+) of \d+ micro-batches are done"):
        begun.close(opened)
    opened.stage.backward(len(opened.stage.micros) - 1, None)
    begun.close(opened)
    assert begun.results[0].is_applied
    assert begun.open() is None


def test_nothing_trained_is_nothing_to_do():
    trainer = make_trainer(tiny_llama(), micro_batch_tokens=BUDGET)
    mask = Column("trained", RETURNS.level, 9, 0)
    rows = rows_with(mask).with_column(mask, np.zeros(rows_with().num_tokens))
    call = LossCall(policy_loss, {"advantages": ADVANTAGES}, mask=mask)
    begun = trainer.begin([LossTerm(rows, call)], step=0)
    opened = begun.open()
    assert opened.copies == ((),)
    assert begun.close(opened) is None
    (result,) = begun.results
    assert (result.terms, result.report) == ((TermResult({"actor/loss": 0.0}, is_masked=True),), None)
    assert trainer.optimizer.attempted_steps == 0

"""Whether a loss adds up over micro-batches: told without a model, and without a trace in the run."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from plait.algorithms.distill import distill_loss
from plait.data.rows import Rows
from plait.dataflow import Column, Level
from plait.training.loss_split import split_gap
from plait.training.mini_batch import LossCall
from plait.training.trainer_settings import SampleSettings
from tests.training.batches import ADVANTAGES, random_rows


def gap_of(loss: Callable[..., Any], rows: Rows | None = None, *, role: str = "actor", **options: Any) -> float | None:
    options = {"columns": {"advantages": ADVANTAGES}} | options
    samples = SampleSettings(temperature=1.0, max_response_tokens=12)
    return split_gap(random_rows(empty=True) if rows is None else rows, LossCall(loss, **options), role, samples)


def mean(batch, advantages):
    return -(advantages * batch.logprobs).mean()


def aggregated(how):
    return lambda batch, advantages: batch.aggregate(-advantages * batch.logprobs - 0.1 * batch.entropies, how)


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_aggregates_add_up(how):
    gap = gap_of(aggregated(how))
    assert gap is not None
    assert gap < 1e-5


def test_other_shares_add_up():
    def by_response(batch, advantages):
        return batch.mean_over_sequences(batch.per_sequence(-advantages * batch.logprobs).tanh())

    def a_sum(batch, advantages):
        return (batch.logprobs.exp() * advantages).sum()

    for loss in (by_response, a_sum):
        gap = gap_of(loss)
        assert gap is not None
        assert gap < 1e-5


def test_a_mean_over_two_equal_halves_is_twice_that_over_all():
    """Eight responses of one token each: ‖2g − g‖ / ‖g‖ = 1."""
    rows = random_rows(4, 2)
    one_token = Rows(tuple(type(s)(s.prompt, s.index, (5,), (-1.0,), "", s.finish_reason) for s in rows.samples))
    one_token = one_token.with_column(ADVANTAGES, rows.columns[ADVANTAGES])
    assert gap_of(mean, one_token) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        mean,
        lambda batch, advantages: (-advantages * batch.logprobs * batch.mask).sum() / batch.mask.sum(),
        lambda batch, advantages: batch.aggregate(-(advantages - advantages.mean()) * batch.logprobs, "token-mean"),
        lambda batch, advantages: batch.per_sequence(batch.logprobs * advantages).mean(),
    ],
    ids=["mean", "by the mask", "whitened in the micro-batch", "over responses"],
)
def test_what_does_not_add_up_is_seen(loss):
    gap = gap_of(loss)
    assert gap is not None
    assert gap > 0.1


def test_a_loss_over_other_tokens():
    """Of columns that hold several numbers of each token."""
    rows = random_rows(empty=True)
    ids, top = (Column(name, Level.TOKEN, 5, 0, width=width) for name, width in (("ids", 3), ("top", 4)))
    shared = np.log(np.random.default_rng(0).dirichlet(np.ones(4), rows.num_tokens))
    rows = rows.with_column(ids, np.zeros((rows.num_tokens, 3))).with_column(top, shared)
    columns = {"teacher_ids": ids, "teacher_logprobs": top}
    for beta in (0.0, 0.5, 1.0):
        added = gap_of(partial(distill_loss, beta=beta), rows, columns=columns)
        assert added is not None
        assert added < 1e-5
    split = gap_of(lambda batch, teacher_ids: batch.logprobs_at(teacher_ids).mean(), rows, columns={"teacher_ids": ids})
    assert split is not None
    assert split > 0.1


def test_scalar_models():
    mean_of_values = gap_of(lambda batch, advantages: ((batch.values - advantages) ** 2).mean(), role="critic")
    assert mean_of_values is not None
    assert mean_of_values > 0.1
    added = gap_of(
        lambda batch, advantages: batch.aggregate((batch.values - advantages) ** 2, "token-mean"), role="critic"
    )
    assert added is not None
    assert added < 1e-5


def test_pairs_stay_together():
    def pairs(batch, scale):
        chosen, rejected = batch.pairs(batch.per_sequence(batch.logprobs))
        margins = torch.nn.functional.softplus(rejected - chosen)
        return margins.mean() if scale else batch.mean_over_pairs(margins)

    rows = random_rows(6, 2)
    options: dict[str, Any] = {"whole_groups": True, "columns": {}}
    added = gap_of(lambda batch: pairs(batch, False), rows, **options)
    assert added is not None
    assert added < 1e-5
    mean_of_pairs = gap_of(lambda batch: pairs(batch, True), rows, **options)
    assert mean_of_pairs is not None
    assert mean_of_pairs > 0.1


def test_a_step_without_advantages_hides_nothing():
    rows = random_rows()
    flat = rows.with_column(ADVANTAGES, np.zeros(len(rows)))
    gap = gap_of(mean, flat)
    assert gap is not None
    assert gap > 0.1


def test_what_cannot_be_told_is_not_said():
    calls = []

    def counts(batch, advantages):
        calls.append(1)
        return batch.logprobs.mean() * len(calls)

    assert gap_of(lambda batch, advantages: (batch.logprobs * torch.rand(())).mean()) is None, "it draws"
    assert gap_of(counts) is None
    assert gap_of(lambda batch, advantages: batch.nothing) is None
    assert gap_of(lambda batch, advantages: batch.logprobs.mean() * float("nan")) is None
    assert gap_of(mean, random_rows(1, 1)) is None, "one sample cannot be split"


def test_no_random_state_changes():
    def draws(batch, advantages):
        noise = torch.rand(len(advantages)) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return (batch.logprobs * noise).mean()

    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    gap_of(draws)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert before[2] == random.getstate()

"""What a loss sees, by hand: masks, sums per sequence, pairs, means and their logs, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from plait.algorithms.losses import Aggregation
from plait.data.records import FinishReason, Prompt, Sample
from plait.data.rows import Rows
from plait.errors import RunError
from plait.models.outputs import Outputs
from plait.training.loss_batch import MicroBatchLoss, Responses
from plait.training.mini_batch import loss_share
from plait.training.token_means import MiniBatchTotals, TokenMeans
from tests.algorithms.batches import leaf

NAN = math.nan
LENGTHS = [3, 2, 2]
VALUES = [4.0, NAN, 2.0, NAN, NAN, 5.0, 7.0]
MASK = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]
"""Three samples: the first loses its middle token, the second is masked altogether, the third is whole."""
TOTALS = MiniBatchTotals(tokens=4, sequences=2, max_response_tokens=10)


def batch_of(
    values: list[float],
    lengths: list[int],
    totals: MiniBatchTotals,
    *,
    mask: list[float] | None = None,
    means: TokenMeans | None = None,
    samples: list[tuple[int, int]] | None = None,
    scores: list[float] | None = None,
    whole_groups: bool = True,
) -> MicroBatchLoss:
    """A language model's batch, or a scalar model's where there are scores."""
    values_R = leaf(values)
    mask_R = None if mask is None else torch.tensor(mask, dtype=torch.float64)
    responses = Responses(lengths, values_R.detach(), mask_R, samples, whole_groups)
    means = means or TokenMeans(totals.tokens)
    if scores is None:
        return MicroBatchLoss(Outputs(values_R, values_R), responses, totals, means)
    outputs = Outputs(values_R=values_R, scores_N=leaf(scores))
    return MicroBatchLoss(outputs, responses, totals, means, role="critic")


@pytest.mark.parametrize(
    ("how", "expected", "slopes"),
    [
        ("token-mean", 18 / 4, [1 / 4, 1 / 4, 1 / 4]),
        ("seq-mean-token-mean", (6 / 2 + 12 / 2) / 2, [1 / 4, 1 / 4, 1 / 4]),
        ("seq-mean-token-sum-norm", 18 / (2 * 10), [1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_masked_tokens_are_in_neither_sum_nor_denominator(how, expected, slopes):
    """Values that are masked may be anything, NaN too: they reach neither the loss nor a gradient."""
    batch = batch_of(VALUES, LENGTHS, TOTALS, mask=MASK)
    assert batch.mask.tolist() == MASK
    share = batch.aggregate(batch.logprobs, how)
    assert share.item() == pytest.approx(expected)
    share.backward()
    first, second, third = slopes
    assert batch.logprobs.grad.tolist() == pytest.approx([first, 0, first, 0, 0, second, third])


@pytest.mark.parametrize("how", list(Aggregation))
def test_a_batch_that_is_masked_altogether_is_zero(how):
    """Not NaN: neither the loss, nor its gradient, nor a log, whatever is computed on the way."""
    totals = MiniBatchTotals(tokens=0, sequences=0, max_response_tokens=10)
    means = TokenMeans(0)
    batch = batch_of([1.0, 2.0, 3.0], [2, 1], totals, mask=[0.0] * 3, means=means)
    mean_R = batch.sequence_sum(batch.logprobs) / batch.sequence_sum(torch.ones_like(batch.logprobs))
    assert mean_R.isnan().all(), "0 / 0 on the way is part of the test"
    share = batch.aggregate(mean_R + batch.logprobs, how) + batch.mean_over_sequences(
        batch.per_sequence(batch.logprobs)
    )
    share.backward()
    batch.log("x", mean_R)
    assert share.item() == 0
    assert batch.logprobs.grad.tolist() == [0, 0, 0]
    assert means.result() == {"x": 0}


def test_without_a_mask_all_is_trained():
    batch = batch_of([1.0, 2.0], [2], MiniBatchTotals(2, 1, 10))
    assert batch.mask.tolist() == [1, 1]
    assert not batch.mask.requires_grad


def test_sums_per_sequence_by_hand():
    batch = batch_of(VALUES, LENGTHS, TOTALS, mask=MASK)
    sums_N = batch.per_sequence(batch.logprobs)
    assert sums_N.tolist() == [6, 0, 12]
    sums_R = batch.sequence_sum(batch.logprobs)
    assert sums_R.tolist() == [6, 6, 6, 0, 0, 12, 12]
    (sums_N * torch.tensor([10.0, 100.0, 1000.0])).sum().backward()
    assert batch.logprobs.grad.tolist() == [10, 0, 10, 0, 0, 1000, 1000]


def test_a_mean_over_sequences_counts_those_with_a_trained_token():
    means = TokenMeans(4)
    batch = batch_of(VALUES, LENGTHS, TOTALS, mask=MASK, means=means, scores=[1.0, NAN, 5.0])
    share = batch.mean_over_sequences(batch.scores)
    assert share.item() == 3
    share.backward()
    assert batch.scores.grad.tolist() == [0.5, 0, 0.5]
    batch.log("score", batch.scores, per="sequence")
    batch.log("value", batch.values)
    assert means.result() == {"score": 3, "value": 18 / 4}


def test_pairs_by_hand():
    """Rows in another order than chosen, rejected; the pair of prompt 8 lost its rejected sample to the mask; of prompt
    9, of which more were drawn, two are left."""
    samples = [(7, 1), (8, 0), (7, 0), (8, 1), (9, 2), (9, 5)]
    totals = MiniBatchTotals(tokens=5, sequences=5, max_response_tokens=10, pairs=2)
    means = TokenMeans(5)
    batch = batch_of(
        [0.0] * 6,
        [1] * 6,
        totals,
        mask=[1, 1, 1, 0, 1, 1],
        means=means,
        samples=samples,
        scores=[1, 20, 3, 40, 5, 60],
    )
    chosen_P, rejected_P = batch.pairs(batch.scores)
    assert (chosen_P.tolist(), rejected_P.tolist()) == ([3, 5], [1, 60])
    share = batch.mean_over_pairs(chosen_P - rejected_P)
    assert share.item() == (2 - 55) / 2
    share.backward()
    assert batch.scores.grad.tolist() == [-0.5, 0, 0.5, 0, 0.5, -0.5]
    batch.log("margin", chosen_P - rejected_P, per="pair")
    assert means.result() == {"margin": -26.5}


def test_no_pair_left_gives_zero():
    totals = MiniBatchTotals(tokens=1, sequences=1, max_response_tokens=10, pairs=0)
    batch = batch_of([0.0, 0.0], [1, 1], totals, mask=[1, 0], samples=[(7, 0), (7, 1)], scores=[1, 2])
    chosen_P, rejected_P = batch.pairs(batch.scores)
    share = batch.mean_over_pairs(chosen_P - rejected_P)
    share.backward()
    assert share.item() == 0
    assert batch.scores.grad.tolist() == [0, 0]


@pytest.mark.parametrize("samples", [[(7, 0)], [(7, 1), (8, 0)], [(7, 0), (7, 1), (7, 2)]], ids=str)
def test_what_is_no_pair_is_refused(samples):
    count = len(samples)
    totals = MiniBatchTotals(count, count, 10)
    batch = batch_of([0.0] * count, [1] * count, totals, samples=samples, scores=[0.0] * count)
    with pytest.raises(RunError, match=r"expected two samples of every prompt, .*prompt 7; .*whole_groups=True"):
        batch.pairs(batch.scores)


def test_two_of_a_larger_group_are_no_pair_where_groups_may_be_split():
    """A micro-batch has what its budget lets it have: which samples are compared must not hang on that."""
    totals = MiniBatchTotals(2, 2, 10, pairs=1)
    for samples, is_pair in (([(7, 0), (7, 1)], True), ([(7, 2), (7, 3)], False)):
        batch = batch_of([0.0] * 2, [1] * 2, totals, samples=samples, scores=[1.0, 2.0], whole_groups=False)
        if is_pair:
            assert [value.tolist() for value in batch.pairs(batch.scores)] == [[1], [2]]
        else:
            with pytest.raises(RunError, match=r"found \[2, 3\] of prompt 7; give critic.train whole_groups=True"):
                batch.pairs(batch.scores)


def test_logs_add_up_over_micro_batches():
    means = TokenMeans(4)
    parts = [
        (VALUES[:5], LENGTHS[:2], MASK[:5], [1.0, 2.0], [(1, 0), (1, 1)]),
        (VALUES[5:], LENGTHS[2:], MASK[5:], [5.0], [(2, 0)]),
    ]
    for values, lengths, mask, scores, samples in parts:
        batch = batch_of(values, lengths, TOTALS, mask=mask, means=means, scores=scores, samples=samples)
        batch.log("token", batch.values)
        batch.log("sequence", batch.scores, per="sequence")
    assert means.result() == {"token": 18 / 4, "sequence": 3}


def test_totals_of_rows():
    # Prompt 1: samples of 2 and 3 tokens, prompt 2: of 1 and 0, prompt 3: of 2 and 2, of which the first is masked.
    lengths = {(1, 0): 2, (1, 1): 3, (2, 0): 1, (2, 1): 0, (3, 0): 2, (3, 1): 2}
    samples = tuple(
        Sample(Prompt(uid, "", (5,)), index, (8,) * length, (-1.0,) * length, "", FinishReason.STOP)
        for (uid, index), length in lengths.items()
    )
    rows = Rows(samples)
    assert MiniBatchTotals.of(rows, 12) == MiniBatchTotals(10, 5, 12, 2)
    mask = np.array([1, 0, 1, 1, 1, 1, 0, 0, 1, 1], dtype=np.float64)
    assert MiniBatchTotals.of(rows, 12, mask) == MiniBatchTotals(7, 4, 12, 1)
    assert MiniBatchTotals.of(rows.select([0]), 12).pairs == 0


def test_a_model_is_asked_for_what_it_has():
    language = batch_of([1.0], [1], MiniBatchTotals(1, 1, 10))
    scalar = batch_of([1.0], [1], MiniBatchTotals(1, 1, 10), scores=[1.0])
    for name in ("values", "scores"):
        with pytest.raises(RunError, match=rf"batch.{name}: role `actor` is a language model, .*`logprobs`"):
            getattr(language, name)
    for name in ("logprobs", "entropies"):
        with pytest.raises(RunError, match=rf"batch.{name}: role `critic` is a scalar model, .*`values`"):
            getattr(scalar, name)


def test_what_a_batch_does_not_have_is_named_with_what_it_has():
    batch = batch_of([1.0], [1], MiniBatchTotals(1, 1, 10))
    for name, message in {
        "entropy": r"a batch has no `entropy` \(did you mean `entropies`\?\), but mask, sampling_logprobs, logp",
        "advantages": "a batch has no `advantages`, but .*; columns are arguments of the loss",
    }.items():
        with pytest.raises(AttributeError, match=message):
            getattr(batch, name)
    with pytest.raises(RunError, match=r"found \[0, 0, 0") as raised:
        batch.aggregate([0] * 1000, "token-mean")
    assert len(str(raised.value)) < 200


def test_what_a_property_of_a_batch_cannot_read_is_said_as_it_is(monkeypatch):
    batch = batch_of([1.0], [1], MiniBatchTotals(1, 1, 10))
    monkeypatch.setattr(type(batch), "logprobs", property(lambda batch: None.nothing))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'nothing'"):
        batch.logprobs  # noqa: B018


def test_wrong_shapes_are_refused():
    batch = batch_of([1.0, 2.0], [2], MiniBatchTotals(2, 1, 10), samples=[(7, 0)], scores=[1.0])
    with pytest.raises(RunError, match=r"batch.per_sequence: expected one value per response token, \(2,\), found"):
        batch.per_sequence(batch.scores)
    for call in (batch.mean_over_sequences, batch.pairs):
        with pytest.raises(RunError, match=r"expected one value per sample, \(1,\), found \(2,\)"):
            call(batch.values)
    with pytest.raises(RunError, match=r"batch.log\('x'\): expected one value per sample, \(1,\), found 3.0"):
        batch.log("x", 3.0, per="sequence")
    with pytest.raises(RunError, match="expected per= token, sequence or pair, found 'row'"):
        batch.log("x", batch.values, per="row")
    pair = batch_of([1.0, 2.0], [1, 1], MiniBatchTotals(2, 2, 10, 1), samples=[(7, 0), (7, 1)], scores=[1.0, 2.0])
    with pytest.raises(RunError, match=r"batch.mean_over_pairs: expected one value per pair, \(1,\), found \(2,\)"):
        pair.mean_over_pairs(pair.scores)


def test_a_loss_without_a_gradient_will_do_where_none_is_needed():
    batch = batch_of([1.0, 2.0], [2], MiniBatchTotals(2, 1, 10))

    def constant(batch):
        return batch.logprobs.detach().sum()

    assert loss_share(constant, batch, {}, needs_gradient=False).item() == 3
    with pytest.raises(RunError, match=r"loss `constant` has no gradient: .*batch.values"):
        loss_share(constant, batch, {})

"""SFT: its loss by hand, over any split and mask, and what the flow calls."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.algorithms.losses import cross_entropy
from plait.algorithms.safe_rlhf import SafeRLHFOptions, safe_rlhf
from plait.algorithms.sft import SFTOptions, sft
from plait.dataflow import CallKind
from tests.algorithms.batches import Outputs, run_loss
from tests.algorithms.flows import graph_of, loss_of

LN2 = math.log(2)


def test_cross_entropy_by_hand():
    # Probabilities 1/2, 1/4 | 1/8: 1 + 2 + 3 times ln 2 over three tokens; the second token is somebody else's.
    likeliest, mask = np.array([1.0, 1, 0]), np.array([1.0, 0, 1])
    outputs = Outputs([2, 1], logprobs=-LN2 * np.array([1.0, 2, 3]), likeliest=likeliest, mask=mask)
    found = run_loss(loss_of(sft, SFTOptions()), outputs)
    assert found.loss == pytest.approx(2 * LN2)
    assert found.gradients["logprobs"] == [-0.5, 0, -0.5]
    assert found.metrics == pytest.approx({"actor/nll": 2 * LN2, "actor/mean_token_accuracy": 1 / 2})


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), st.integers(0, 2**31))
def test_cross_entropy_is_over_trained_tokens_of_the_whole_mini_batch(lengths, seed):
    rng = np.random.default_rng(seed)
    logprobs, mask = -rng.exponential(size=sum(lengths)), rng.integers(0, 2, sum(lengths)).astype(float)
    mask[0] = 1
    found = run_loss(
        loss_of(sft, SFTOptions()),
        Outputs(lengths, logprobs=logprobs, mask=mask),
        cut=int(rng.integers(0, len(lengths) + 1)),
    )
    assert found.loss == pytest.approx(-(logprobs * mask).sum() / mask.sum())
    assert found.gradients["logprobs"] == pytest.approx((-mask / mask.sum()).tolist())


def test_nothing_to_learn_is_zero_not_nan():
    outputs = Outputs([2], logprobs=np.array([-1.0, -2.0]), mask=np.zeros(2))
    found = run_loss(loss_of(sft, SFTOptions()), outputs)
    assert (found.loss, found.gradients["logprobs"]) == (0.0, [0.0, 0.0])


def test_sft_by_sequences():
    outputs = Outputs([1, 3], logprobs=-np.array([4.0, 1, 2, 6]))
    found = run_loss(loss_of(sft, SFTOptions(aggregation="seq-mean-token-mean")), outputs)
    assert found.loss == pytest.approx((4 + 3) / 2)


def test_calls_of_sft():
    graph = graph_of(sft, SFTOptions(mini_batches=2, epochs=3))
    assert [node.call for node in graph.nodes] == ["examples", "actor.train"]
    train = graph.nodes[-1]
    assert train.mask.name == "trained"
    assert (train.training.mini_batches, train.training.epochs) == (2, 3)
    assert graph.roles == ("actor",)


def test_the_pretraining_loss_of_safe_rlhf_is_the_same_with_a_weight():
    outputs = Outputs([2, 1], logprobs=np.array([-1.0, -2, -3]), mask=np.array([1.0, 0, 1]))
    graph = graph_of(safe_rlhf, SafeRLHFOptions(ptx_coef=4.0))
    assert [len(update) for update in graph.updates("actor")] == [1, 1], "each has optimizer steps of its own"
    trained = [node for node in graph.calls("actor") if node.kind is CallKind.TRAIN]
    assert len(trained) == 2
    assert trained[1].rows == graph.of_kind(CallKind.READ)[0].id
    found = run_loss(trained[1].fn, outputs)
    plain = run_loss(cross_entropy, outputs)
    assert found.loss == pytest.approx(4 * plain.loss)
    assert found.metrics == {"actor/ptx_loss": plain.loss}, "logged without its weight"
